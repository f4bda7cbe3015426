"""The options of both managers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import regex
from attrs import Attribute, field, frozen, validators

from turnwise.contracts.env_manager import ManagerCapabilities
from turnwise_managers.templates import parse_template

COLUMNS = frozenset({"expert_indices"})
"""Token columns of samples whose sampler gives them."""


def _pattern(_: Any, attribute: Attribute[Any], value: str | None) -> None:
    if value is None:
        return
    try:
        groups = regex.compile(value, regex.DOTALL).groups
    except regex.error as error:
        raise ValueError(
            f"{attribute.name} is not a regular expression: {value!r} ({error}). Fix: for example"
            " <answer>(.*?)</answer>"
        ) from error
    if groups == 0:
        raise ValueError(
            f"{attribute.name} has no group: {value!r}. Fix: put the action in one, as in <answer>(.*?)</answer>"
        )


def _template(_: Any, attribute: Attribute[Any], value: str | None) -> None:
    if value is not None:
        parse_template(attribute.name, value)


@frozen(kw_only=True)
class ManagerConfig:
    """What both managers share. Raises ValueError for a pattern without a group and for an unknown placeholder.

    `action_pattern`: a regular expression, searched across lines; the last group that took part in the `match` (`first`
    or `last`), stripped, is the action (null: the whole response, stripped). `strip_thinking`: whether
    `<think>…</think>` is left out of the response before (null: where a pattern is given that does not itself look for
    thinking). `format_penalty`: added to a turn's reward when the pattern finds nothing, as given (−0.1 punishes).
    `agent_system_template`: the system message, as it is. `agent_template`: the user's message of a turn (null: the
    observation); `pre_step_template` and `next_step_template`: text before and after the observation. Their
    placeholders: turnwise_managers.templates.
    `template_args`: further arguments for the model's chat template, such as `enable_thinking`.
    """

    action_pattern: str | None = field(default=None, validator=_pattern)
    match: Literal["first", "last"] = field(default="first", validator=validators.in_(("first", "last")))
    strip_thinking: bool | None = None
    format_penalty: float = 0.0
    agent_system_template: str | None = None
    agent_template: str | None = field(default=None, validator=_template)
    pre_step_template: str | None = field(default=None, validator=_template)
    next_step_template: str | None = field(default=None, validator=_template)
    template_args: dict[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class TrajectoryConfig(ManagerConfig):
    """`history`: turns as chat messages, or the whole dialogue inside one assistant message. `detect_drift`: render
    every prompt anew and compare it with the tokens in use."""

    capabilities: ClassVar[ManagerCapabilities] = ManagerCapabilities(drift_option="detect_drift", columns=COLUMNS)
    history: Literal["messages", "single_turn"] = field(
        default="messages", validator=validators.in_(("messages", "single_turn"))
    )
    detect_drift: bool = False


@frozen(kw_only=True)
class StepwiseConfig(ManagerConfig):
    """`history_length`: how many earlier turns a prompt shows (null: all of them). `merge_steps`: join the samples of
    neighbouring turns where prompt and response of one begin the next one's prompt."""

    history_length: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    merge_steps: bool = False

    @property
    def capabilities(self) -> ManagerCapabilities:
        """A row of each turn, or of several that continue each other."""
        return ManagerCapabilities(row_per_turn=True, joins_turns=self.merge_steps, columns=COLUMNS)
