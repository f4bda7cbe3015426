"""What all processes of a run have in common: how they begin, how their answers, failures and logs reach the driver."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ray
from attrs import field, frozen

import turnwise.contracts.rollout
import turnwise.errors
from turnwise.errors import EngineLost, TurnwiseError
from turnwise.plugins import registry

log = logging.getLogger("turnwise")

Actor: TypeAlias = Any
"""Ray's handle of a process: Ray declares no types for what is called on it."""

_CAUSE = 400
"""Characters of Ray's account of a death that fit into one line."""

_CALLS = 1_000_000
"""Calls that an asynchronous process takes at once: more than there are episodes. Behind Ray's own limit of 1000 whatever else is asked waits."""

WATCH_SECONDS = 5.0
"""Between two looks at a process."""
RECORD_SECONDS = 1.0
"""How long a log record waits for the next answer."""


@frozen
class Home:
    """Where a process begins: the driver's folder (if it is there), and the plugins that it declares."""

    folder: str
    plugins: tuple[str, ...]
    base: str

    def enter(self) -> None:
        """Go there. Raises PluginError where the machine lacks a plugin."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        registry().declare(self.plugins, Path(self.base))


@frozen
class Failure:
    """An exception as plain data, for its class may not exist in the driver. `sampled_tokens`: as EnvironmentFailure's."""

    kind: str
    text: str
    trace: str
    sampled_tokens: int = 0

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What `error` was. A subclass of an error of Turnwise travels as that."""
        # The nearest class that the driver knows: a plugin's own may not be installed there.
        known = [base.__name__ for base in type(error).__mro__ if _own(base.__name__) is base]
        trace, tokens = "".join(traceback.format_exception(error)), getattr(error, "sampled_tokens", 0)
        return cls(known[0] if known else type(error).__name__, str(error), trace, tokens)

    @property
    def foreseen(self) -> bool:
        """Whether it is an error of Turnwise, made for a reader."""
        return _own(self.kind) is not None

    def error(self, where: str, otherwise: type[TurnwiseError]) -> TurnwiseError:
        """The error to raise in the driver: of its own class if that is Turnwise's, else of `otherwise`; the traceback
        is its cause."""
        own = _own(self.kind)
        if own is not None:
            raised: TurnwiseError = own(f"{where}: {self.text}")
        else:
            raised = otherwise(f"{where} raised {self.kind}: {' '.join(self.text.split())}")
        raised.__cause__ = RemoteTraceback(self.trace)
        return raised


def _own(name: str) -> type[TurnwiseError] | None:
    """The error of Turnwise by this name: of a boundary, or of an episode."""
    found = getattr(turnwise.errors, name, None) or getattr(turnwise.contracts.rollout, name, None)
    return found if isinstance(found, type) and issubclass(found, TurnwiseError) else None


class RemoteTraceback(Exception):
    """The traceback of an error in another process, for `--debug`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@frozen(eq=False)
class Answer:
    """What a process answered: a value or a failure, and what it logged since its last answer, as (level, text)."""

    value: Any = None  # what the process returned
    failure: Failure | None = None
    records: list[tuple[int, str]] = field(factory=list)

    @property
    def lost(self) -> bool:
        """Whether what stands behind the process has ended (EngineLost)."""
        return self.failure is not None and self.failure.kind == EngineLost.__name__

    def log_records(self, where: str) -> None:
        """Log records go to the driver's log under the name `where`."""
        for level, text in self.records:
            log.log(level, "%s: %s", where, text)

    def unwrap(self, where: str, otherwise: type[TurnwiseError]) -> Any:  # what the process returned
        """The value; its failure is raised here, once what was logged is in the driver's log."""
        self.log_records(where)
        if self.failure is not None:
            raise self.failure.error(where, otherwise)
        return self.value


class _Records(logging.Handler):
    """Keeps what is logged until it is fetched."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: list[tuple[float, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((time.monotonic(), record.levelno, record.getMessage()))

    def take(self, age: float = 0.0) -> list[tuple[int, str]]:
        """All, once the first was kept for `age` seconds; from any thread."""
        self.acquire()
        try:
            # The next answer may still take them, in the order in which they belong.
            if self._kept and time.monotonic() - self._kept[0][0] < age:
                return []
            taken, self._kept = self._kept, []
        finally:
            self.release()
        return [(level, text) for _, level, text in taken]


_ASIDE = "aside"
"""Ray's group of calls that are answered on a thread of their own, whatever else runs."""


def process(kind: type[Process], name: str, options: Mapping[str, Any], *, many: bool = False) -> Actor:
    """Start an actor of `kind` under `name`; `many`: it is asynchronous and takes any number of calls at once."""
    calls = {"max_concurrency": _CALLS} if many else {}
    return ray.remote(concurrency_groups={_ASIDE: 1})(kind).options(**options, **calls).remote(name)


class Process:
    """A process of a run. Ray writes `repr` before every line that it prints. Its methods answer with an `Answer` and
    do not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._records = _Records()
        own = logging.getLogger("turnwise")
        # What would be printed here as well would reach the driver twice: by the answer, and by Ray.
        own.handlers, own.propagate = [self._records], False
        own.setLevel(logging.INFO)

    def __repr__(self) -> str:
        return self._name

    def node(self) -> tuple[str, str]:
        """(id, address) of the node that it runs on."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    @ray.method(concurrency_group=_ASIDE)
    def said(self) -> Answer:
        """What was logged and no answer has carried within RECORD_SECONDS, for it may be long until there is one."""
        return Answer(records=self._records.take(RECORD_SECONDS))

    def answer(self, work: Callable[[], object]) -> Answer:
        """The answer of blocking work."""
        try:
            return Answer(work(), records=self._records.take())
        except Exception as error:  # raised in the driver
            return Answer(failure=Failure.of(error), records=self._records.take())

    async def answer_later(self, work: Awaitable[object]) -> Answer:
        """The answer of a coroutine; its cancellation is a failure, too."""
        try:
            return Answer(await work, records=self._records.take())
        except (Exception, asyncio.CancelledError) as error:
            return Answer(failure=Failure.of(error), records=self._records.take())


def packed(value: object) -> bytes:
    """`value` pickled, to be unpacked after the plugins are declared, of whose classes it may be made. Raises
    TurnwiseError."""
    try:
        data: bytes = ray.cloudpickle.dumps(value)
    except Exception as error:
        raise TurnwiseError(
            f"runtime ray: what a process is built from cannot be pickled ({type(error).__name__}: {error}). Fix: plain"
            " data in the options"
        ) from error
    return data


def unpacked(data: bytes) -> Any:  # what was packed, which the caller knows
    """Undo `packed`."""
    return pickle.loads(data)


def death(error: BaseException) -> str:
    """Why an actor is gone, in Ray's words, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = [
        line
        for line in lines
        if not line.startswith(("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:"))
    ]
    text = " ".join(" ".join(reason or lines).split())
    return text if len(text) <= _CAUSE else f"{text[:_CAUSE]}…"


# Any: Ray declares no types for references and what they refer to.
async def result(ref: Any, timeout: float | None = None) -> Any:
    """The value of an object reference. Raises TimeoutError, or Ray's error; a reference that is given up stays
    silent."""
    future = asyncio.wrap_future(ref.future())
    # An exception that nobody fetches would be logged by asyncio when the future is collected.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    # Shielded, for cancelling the wait must not cancel the call: whoever wants that asks Ray to.
    return await asyncio.wait_for(asyncio.shield(future), timeout)
