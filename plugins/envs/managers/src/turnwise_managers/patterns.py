"""From a response to the action in it: thinking left out, then the group of a pattern's first or last match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import regex
from attrs import frozen

from turnwise.errors import EnvironmentFailure

if TYPE_CHECKING:
    from turnwise_managers.config import ManagerConfig

PATIENCE = 1.0
"""Seconds that a pattern may take on one response. It runs on the event loop, where a catastrophic one would hold every other episode."""

_CLOSED = regex.compile(r"<(think|thinking)>.*?</\1>", regex.DOTALL)
_BEGUN_IN_THE_PROMPT = regex.compile(r".*</think(ing)?>", regex.DOTALL)
_UNFINISHED = regex.compile(r"<think(ing)?>.*", regex.DOTALL)


def without_thinking(text: str) -> str:
    """`text` without what stands between `<think>` and `</think>` (or `<thinking>`).

    A block that the chat template opened in the prompt has its end alone, one that was cut has its beginning alone:
    both are thinking.
    """
    # Whole blocks first: a leftover end then belongs to the prompt, a leftover beginning to a cut.
    for pattern in (_CLOSED, _BEGUN_IN_THE_PROMPT, _UNFINISHED):
        text = pattern.sub("", text)
    return text


@frozen
class ActionFinder:
    """Finds the action in responses. `pattern` None: the whole response is the action."""

    pattern: regex.Pattern[str] | None
    match: Literal["first", "last"] = "first"
    strip_thinking: bool = False

    @classmethod
    def of(cls, config: ManagerConfig) -> ActionFinder:
        """As a manager's options say. Thinking is left out by default where a pattern is given that does not itself
        look for it."""
        text, strip = config.action_pattern, config.strip_thinking
        if strip is None:
            # A pattern that asks for <think> would find nothing where it was taken out before.
            strip = text is not None and "think" not in text
        return cls(None if text is None else regex.compile(text, regex.DOTALL), config.match, strip)

    def find(self, text: str, where: str) -> str:
        """The action, stripped: of the match, the last of its groups that took part in it. The empty string if there is
        none.

        Raises EnvironmentFailure for a pattern that takes longer than a second; `where` is for its message."""
        if self.strip_thinking:
            text = without_thinking(text)
        if self.pattern is None:
            return text.strip()
        try:
            found = self._found(self.pattern, text)
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"action_pattern took more than {PATIENCE:g} s on a response of {len(text)} characters, in {where}. "
                "Fix: a pattern without repetitions inside repetitions."
            ) from error
        groups: Iterable[str | None] = () if found is None else reversed(found.groups())
        return next((group for group in groups if group is not None), "").strip()

    def _found(self, pattern: regex.Pattern[str], text: str) -> regex.Match[str] | None:
        if self.match == "first":
            return pattern.search(text, timeout=PATIENCE)
        matches = list(pattern.finditer(text, timeout=PATIENCE))
        return matches[-1] if matches else None
