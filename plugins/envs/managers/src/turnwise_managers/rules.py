"""A manager's options, made ready once: what finds the action, and the parsed templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from turnwise_managers.config import ManagerConfig
from turnwise_managers.patterns import ActionFinder
from turnwise_managers.templates import Template, parse_template


@frozen
class Rules:
    """How observations are shown and actions found. `history_length`: how many earlier calls a prompt shows (None:
    all)."""

    actions: ActionFinder
    format_penalty: float
    system: str | None
    user: Template | None
    before: Template | None
    after: Template | None
    history_length: int | None = None
    template_args: Mapping[str, Any] = field(factory=dict)

    @classmethod
    def of(cls, config: ManagerConfig, history_length: int | None = None) -> Rules:
        """The rules that `config` states."""
        return cls(
            actions=ActionFinder.of(config),
            format_penalty=config.format_penalty,
            system=config.agent_system_template,
            user=_parsed("agent_template", config.agent_template),
            before=_parsed("pre_step_template", config.pre_step_template),
            after=_parsed("next_step_template", config.next_step_template),
            history_length=history_length,
            template_args=config.template_args,
        )

    @property
    def history_in_text(self) -> bool:
        """Whether the user's message itself tells the earlier calls."""
        return any(
            template is not None and "history" in template.names for template in (self.user, self.before, self.after)
        )


def _parsed(key: str, text: str | None) -> Template | None:
    return None if text is None else parse_template(key, text)
