"""A chosen implementation before it is built: whether it is there, what it lacks of its contract, and what it says
itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from turnwise.config.schema import Choice
from turnwise.entries import Entry
from turnwise.errors import PluginError, Problem, one_line
from turnwise.importing import StrangerError, guarded
from turnwise.plugins import registry

NEEDED = {
    "train_strategy": ("transports", "check"),
    "inference_backend": ("input", "transports", "check", "receivers"),
    "advantage_estimator": ("token_rewards", "whiten", "normalization", "compute"),
    "group_filter": ("keep",),
    "batch_adjust": ("plan", "updates"),
}
"""What is read here of the classes of roles, and by the loop of the implementations that are built here."""


# Any: the class of a stranger
def there(kind: str, choice: Choice) -> tuple[Entry, Any] | None:
    """A choice's entry and class; None where packages are missing, which is the machine's lack. Raises PluginError."""
    entry = registry().find(kind, choice.name)
    return None if entry.missing else (entry, entry.target())


def target(kind: str, choice: Choice | None) -> Any:  # Any: the class of a stranger
    """The class of a choice, None where it cannot be loaded (reported elsewhere)."""
    try:
        return registry().find(kind, choice.name).target() if choice is not None else None
    except PluginError:
        return None


def lacking(kind: str, one: Any) -> list[str]:  # Any: the class of a stranger, or what it builds
    """Members of its contract that an implementation does not have."""
    return [name for name in NEEDED[kind] if not hasattr(one, name)]


def incomplete(entry: Entry, choice: Choice, one: Any) -> str:  # Any: as in `lacking`
    """What an implementation does not have of its contract, as a line; the empty string for a whole one."""
    lacks = lacking(entry.kind, one)
    who = f"{entry.kind} {choice.name!r} (from {entry.owner})"
    return f"{who} lacks {', '.join(lacks)} of its contract. Fix: repair the plugin." if lacks else ""


def signature_problem(target: Any, choice: Choice) -> str:  # Any: the class of a stranger
    """Why `target` cannot be called as plugins are, or the empty string."""
    options = choice.options if choice.config is None else {}
    try:
        inspect.signature(target).bind(choice.config, None, **options)
    except TypeError as error:
        return str(error)
    except ValueError:  # a class that has no signature
        return ""
    return ""


def said(kind: str, choice: Choice, entry: Entry, check: Callable[[], Iterable[Problem]]) -> list[Problem]:
    """What an implementation's check finds; one that fails is a broken plugin."""
    try:
        with guarded():
            found = list(check())
            if odd := [one for one in found if not isinstance(one, Problem)]:
                raise TypeError(f"it gave {odd[0]!r:.60}, which is no turnwise.errors.Problem")
        return found
    except StrangerError as failure:
        why = f"its check failed: {one_line(failure.error)}. Fix: repair the plugin."
        return [Problem("", f"{kind} {choice.name!r} (from {entry.owner}): {why}")]
