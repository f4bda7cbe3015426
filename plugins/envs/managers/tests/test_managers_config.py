"""Templates and options: what is accepted, and what is reported about the rest."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise_managers.config import ManagerConfig, StepwiseConfig, TrajectoryConfig
from turnwise_managers.templates import PLACEHOLDERS, join_content, parse_template, text_of

VALUES = {name: name.upper() for name in PLACEHOLDERS}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ""),
        ("Turn {turn_idx}: {observation}", "Turn TURN_IDX: OBSERVATION"),
        (
            'Answer {"move": "up", "of": {"x": 1}} at {observation}',
            'Answer {"move": "up", "of": {"x": 1}} at OBSERVATION',
        ),
        ('{"seen": {observation}}', '{"seen": OBSERVATION}'),
        ('{{"move": "{history}"}}', '{"move": "HISTORY"}'),
        (r"\boxed{{answer}} {observation}", r"\boxed{answer} OBSERVATION"),
        ('{"a": 1} {{answer}} {step_count}', '{"a": 1} {answer} STEP_COUNT'),
        ("{} {0} { observation } {current_step", "{} {0} { observation } {current_step"),
        ("".join(f"{{{name}}};" for name in PLACEHOLDERS), "".join(f"{name.upper()};" for name in PLACEHOLDERS)),
    ],
)
def test_placeholders_are_filled_in_and_other_braces_survive(template: str, expected: str) -> None:
    assert parse_template("agent_template", template).render(VALUES) == expected


def test_braces_inside_a_value_are_text() -> None:
    assert (
        parse_template("agent_template", "{observation}").render({"observation": "{turn_idx} {{x}}"})
        == "{turn_idx} {{x}}"
    )


@pytest.mark.parametrize("key", ["agent_template", "pre_step_template", "next_step_template"])
def test_unknown_placeholder_is_reported_with_the_known_ones(key: str) -> None:
    with pytest.raises(
        ValueError,
        match=(
            rf"unknown placeholder \{{turn_id\}} in {key}\. Did you mean 'turn_idx'\? Known: turn_idx,"
            r" observation.*Fix:"
        ),
    ):
        ManagerConfig(**{key: "{turn_id}"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "message"), [("<answer>.*?</answer>", "has no group"), ("(", "is not a regular expression")]
)
def test_unusable_action_pattern_is_reported(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"action_pattern {message}.*Fix:"):
        ManagerConfig(action_pattern=pattern)


@pytest.mark.parametrize(
    ("config", "options"), [(TrajectoryConfig, {"history": "messages?"}), (StepwiseConfig, {"history_length": -1})]
)
def test_impossible_history_is_refused(config: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="history"):
        config(**options)


def test_join_content_is_text_unless_an_image_is_there() -> None:
    picture = {"type": "image", "image": object()}
    text = {"type": "text", "text": "b"}
    assert join_content(["a", [text], ""]) == "ab"
    assert join_content([]) == ""
    assert join_content(["a", [text, picture], "", "c"]) == [
        {"type": "text", "text": "ab"},
        picture,
        {"type": "text", "text": "c"},
    ]
    assert text_of([text, picture, text]) == "bb"
    assert text_of([{"role": "user", "content": "x"}, {"role": "user", "content": [text]}]) == "x\nb"
    assert text_of([]) == ""
