"""What an override or a file takes the place of: lists and choices as a whole, everything else key by key, and who is
blamed then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Loaded
from turnwise.errors import ConfigError

Run = Callable[..., Loaded]
STEPWISE = "custom_envs.Lake.env_manager={use: stepwise, history_length: 3, format_penalty: -1}"


def manager(loaded: Loaded) -> tuple[str, dict[str, Any]]:
    chosen = loaded.config.custom_envs["Lake"].env_manager
    return chosen.name, dict(chosen.options)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("custom_envs.Lake.env_manager={use: trajectory, format_penalty: -2}", ("trajectory", {"format_penalty": -2})),
        ("custom_envs.Lake={env_manager: {use: trajectory}}", ("trajectory", {})),
        ("custom_envs.Lake.env_manager=trajectory", ("trajectory", {})),
        (
            "custom_envs.Lake.env_manager={format_penalty: -2}",
            ("stepwise", {"history_length": 3, "format_penalty": -2}),
        ),
        (
            "custom_envs.Lake.env_manager={use: stepwise, format_penalty: -2}",
            ("stepwise", {"history_length": 3, "format_penalty": -2}),
        ),
        ("custom_envs.Lake.env_manager.format_penalty=-2", ("stepwise", {"history_length": 3, "format_penalty": -2})),
    ],
)
def test_a_choice_of_another_name_replaces_the_old_one_with_its_options(
    run_yaml: Run, override: str, expected: Any
) -> None:
    assert manager(run_yaml("", STEPWISE, override)) == expected


def test_another_strategy_leaves_no_option_of_the_old_one(run_yaml: Run) -> None:
    config = run_yaml(
        "", "actor_infer.strategy_args={strategy_name: sampler, strategy_config: {gpu_memory_utilization: 0.5}}"
    ).config
    assert config.actor_infer.strategy_args is not None
    assert config.actor_infer.strategy_args.options == {"gpu_memory_utilization": 0.5}
    config = run_yaml("", "actor_train.strategy_args={strategy_name: trainer_train}").config
    assert config.actor_train.strategy_args is not None
    assert config.actor_train.strategy_args.options == {}


def test_a_choice_of_another_name_in_a_file_replaces_that_of_an_included_one(run_yaml: Run) -> None:
    Path("below.yaml").write_text("adv_estimator: {use: gigpo, step_reward_weight: 3}\n")
    choice = run_yaml("defaults: [below]\n", "adv_estimator={use: step}").config.adv_estimator
    assert (choice.name, choice.options) == ("step", {})


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("train_env_manager.tags=[Nope]", "$.train_env_manager.tags[0]"),
        ("train_env_manager={tags: [Nope]}", "$.train_env_manager.tags[0]"),
        ("group_filters=[nix]", "$.group_filters[0]"),
        ("actor_infer={generating_args: {max_new_tokens: x}}", "$.actor_infer.generating_args.max_new_tokens"),
    ],
)
def test_an_override_is_blamed_for_what_it_holds(run_yaml: Run, override: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("group_filters:\n- no_signal\n", override)
    assert [line for line in caught.value.problems if not line.startswith(f"override {override!r}: {place}: ")] == []


def test_what_an_override_leaves_alone_is_blamed_on_the_file(run_yaml: Run) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("", "actor_infer={generating_args: {max_new_tokens: 32}}", "actor_infer.generating_args.top_p=2")
    (line,) = caught.value.problems
    assert line.startswith("override 'actor_infer.generating_args.top_p=2': ")
    with pytest.raises(ConfigError) as caught:
        run_yaml("val_env_manager: {num_env_groups: 0, tags: [Lake]}\n", "val_env_manager={tags: [Lake]}")
    assert caught.value.problems[0].startswith("run.yaml:16: $.val_env_manager.num_env_groups: ")
