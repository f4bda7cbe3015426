"""The errors of Turnwise, one type per boundary that was crossed, and the wording of a failed look-up."""

from __future__ import annotations

import contextlib
import difflib
from asyncio import CancelledError
from collections.abc import Iterable, Iterator

from attrs import frozen

NOTE = {"note": True}
"""`extra` of a log record that is no warning and that the terminal shows all the same."""


class TurnwiseError(Exception):
    """Anything that is reported to a user in one line; the command line prints the line, and the traceback only with
    `--debug`."""


class ConfigError(TurnwiseError, ValueError):
    """The configuration cannot be used. `problems` holds one line per mistake; all of them are reported at once.

    `besides`: lines about what is no mistake (`warning: …`, `machine: …`), which a user wants to see with them."""

    def __init__(self, problems: str | Iterable[str], besides: Iterable[str] = ()) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.besides = list(besides)
        super().__init__("\n".join(self.problems))


class PluginError(TurnwiseError, ValueError):
    """A plugin is missing, broken, misnamed, a duplicate, or does not keep its contract."""


class UnknownNameError(PluginError):
    """Nothing that is installed answers to a name. `misspelt`: something of nearly that name does."""

    def __init__(self, text: str, misspelt: bool) -> None:
        super().__init__(text)
        self.misspelt = misspelt

    # By default an exception is unpickled from its text alone, and would lack an argument.
    def __reduce__(self) -> tuple[type, tuple[str, bool]]:
        return type(self), (str(self), self.misspelt)


class MissingPluginError(PluginError):
    """Distributions that the YAML's `plugins:` wants are not installed; pip would bring them all."""


class MachineError(TurnwiseError):
    """The configuration is fine, but this machine lacks something: a device, a package, a writable folder."""


class EnvironmentFailure(TurnwiseError):
    """An environment raised, hung, or returned what its contract forbids. Inside a run this is data: counted, retried,
    left out. `sampled_tokens`: what the model had sampled in the attempt that failed, and nobody will train on."""

    sampled_tokens = 0


class EngineError(TurnwiseError):
    """An inference backend could not serve a request."""


class EngineLost(EngineError):
    """The engine behind a backend has ended: this backend serves no more, and has to be built again."""


class TrainerError(TurnwiseError):
    """A training strategy could not do its work (out of memory, losses that stay non-finite, a lost rank)."""


class OutOfMemory(TrainerError):
    """A training role's memory did not do. What others report at the same time (a backend whose sender is gone) follows
    from it."""


class CheckpointError(TurnwiseError, ValueError):
    """A checkpoint or model folder is missing, incomplete or belongs to another configuration."""


class Interrupted(TurnwiseError):
    """The user stopped what was under way; the message says what was saved."""


@contextlib.contextmanager
def boundary(who: str, kind: type[TurnwiseError]) -> Iterator[None]:
    """Code of a plugin runs inside, and `who` names it. What ends that code and is no Exception (`sys.exit`) leaves as
    an error of type `kind`.

    As it is, the process would end with a status of the plugin's choice, which may be that of success: asyncio lets it
    through to whoever runs the event loop, past everything that would save or report. Ctrl-C and cancellation are the
    run's own and pass."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit, CancelledError):
        raise
    except BaseException as error:
        raise kind(
            f"{who} ended by {one_line(error)}. Fix: code of a plugin returns or raises, and leaves the process alone."
        ) from error


@frozen
class Problem:
    """One thing that is wrong before a run starts.

    `path`: the key at fault, dotted from the root of the configuration (`actor_infer.device_mapping`), or "" where none
    is. `text`: what is
    wrong there, and `Fix: …`. `machine`: the configuration is fine, and this machine lacks something. `warning`: the
    run can start all the same, as where an option has no effect."""

    path: str
    text: str
    machine: bool = False
    warning: bool = False

    def __str__(self) -> str:
        """The line that a user reads."""
        return f"$.{self.path}: {self.text}" if self.path else self.text


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with what is wrong in the configuration; if it is fine, MachineError with what this machine
    lacks; else nothing."""
    found = [problem for problem in problems if not problem.warning]
    if wrong := [str(problem) for problem in found if not problem.machine]:
        raise ConfigError(wrong)
    if found:
        raise MachineError("\n".join(map(str, found)))


def pip_install(*requirements: str) -> str:
    """The command that installs distributions. No package index has Turnwise's own: those come from wheels of its
    repository."""
    names = " ".join(map(repr, requirements))
    return f"pip install --find-links dist {names} (dist: from `make wheels` in Turnwise's repository)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest of `known`, or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """The names, sorted and joined for a message; `none` when there are none."""
    return ", ".join(sorted(names)) or "none"


def one_line(error: BaseException) -> str:
    """`Type: message`, on one line, cut at 500 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a stranger's exception, whose own __str__ raises
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
