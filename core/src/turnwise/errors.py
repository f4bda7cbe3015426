"""The errors of Turnwise, one type per boundary that was crossed, and the wording of a failed look-up."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TurnwiseError(Exception):
    """Anything that a user is told in one line; the command line prints the line, and the traceback only with `--debug`."""


class ConfigError(TurnwiseError, ValueError):
    """The configuration cannot be used. `problems` holds one line per mistake; all of them are reported at once."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PluginError(TurnwiseError, ValueError):
    """A plugin is missing, broken, misnamed, a duplicate, or does not keep its contract."""


class MissingPluginError(PluginError):
    """Distributions that the YAML's `plugins:` wants are not installed; pip would bring them all."""


class MachineError(TurnwiseError):
    """The configuration is fine, but this machine lacks something: a device, a package, a writable folder."""


class EnvironmentFailure(TurnwiseError):
    """An environment raised, hung, or returned what its contract forbids. Inside a run this is data: counted, retried, left out."""


class EngineError(TurnwiseError):
    """An inference backend could not serve a request."""


class EngineLost(EngineError):
    """The engine behind a backend has ended: this backend serves no more, and has to be built again."""


class TrainerError(TurnwiseError):
    """A training strategy could not do its work (out of memory, a non-finite loss, a lost rank)."""


class OutOfMemory(TrainerError):
    """A training role's memory did not do. What others tell at the same time (a backend whose sender is gone) follows from it."""


class CheckpointError(TurnwiseError, ValueError):
    """A checkpoint or model folder is missing, incomplete or belongs to another configuration."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest of `known`, or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """The names, sorted and joined for a message; `none` when there are none."""
    return ", ".join(sorted(names)) or "none"
