"""An environment in a process of its own: built there, called over a pipe, killed when it hangs."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from turnwise.contracts.environment import Response, takes_response
from turnwise.errors import one_line
from turnwise.rollout.origin import raised

_CLOSE_SECONDS = 5.0
_spawning = threading.Lock()


class CallError(Exception):
    """A call failed elsewhere. The message ends a sentence that begins with the call: `raised ValueError: …`."""


class RemoteTracebackError(Exception):
    """The traceback of another process, as text; the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# Any: arguments and results of a stranger's methods.


# Any: what the environment takes and gives
def invoke(environment: Any, method: str, arguments: dict[str, Any]) -> Any:
    """Call a method of an environment; `render` and `close` are optional and give None where they do not exist."""
    if method == "step":
        if takes_response(environment):
            return environment.step(arguments["action"], response=arguments.get("response"))
        return environment.step(arguments["action"])
    call = getattr(environment, method, None) if method in ("render", "close") else getattr(environment, method)
    return call(**arguments) if call is not None else None


class ProcessEnvironment:
    """The environment's methods, blocking; `start` comes first, then `build`. What it is built with must be picklable.

    What fails in the process, and its death, raise CallError, chained to the process's traceback where there is one.
    """

    def __init__(self, build: Callable[[], Any]) -> None:  # Any: an environment, which has Gymnasium's methods
        # Not fork: a child of a process with threads and GPUs would inherit their locks, held by nobody.
        context = multiprocessing.get_context("spawn")
        self._pipe, self._remote = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._remote, build), daemon=True, name="turnwise environment"
        )
        self._killed = False

    def start(self) -> None:
        """Start the process: an interpreter of its own, which imports what the environment needs."""
        with _spawning:  # multiprocessing keeps its table of children without a lock
            self._process.start()
        # This side's copy: as long as one is open here, the end of the process would not close the pipe.
        self._remote.close()
        if self._killed:  # while it was starting
            self.kill()
        try:
            self._receive()
        except CallError:
            self._reap()
            raise

    def build(self) -> None:
        """Build the environment there."""
        self._ask("build", {})

    def reset(self, **arguments: Any) -> Any:  # Any: what the environment takes and gives
        """The environment's `reset`."""
        return self._ask("reset", arguments)

    def step(self, action: str, response: Response | None = None) -> Any:  # Any: what the environment gives
        """The environment's `step`."""
        return self._ask("step", {"action": action, "response": response})

    def render(self) -> Any:  # Any: what the environment gives
        """The environment's `render`, None where it has none."""
        return self._ask("render", {})

    def close(self) -> None:
        """Close the environment and end its process, by force if it takes more than five seconds."""
        try:
            if self._process.is_alive():
                self._pipe.send(("close", {}))
                if not self._pipe.poll(_CLOSE_SECONDS):
                    raise CallError(f"did not return within {_CLOSE_SECONDS:g} s, and its process was killed")
                self._receive()
        except OSError as error:
            raise self._died() from error
        finally:
            self._reap()

    def kill(self) -> None:
        """End the process and what it started, now. Safe from another thread: a call that waits for the process then
        fails."""
        self._killed = True
        pid = self._process.pid
        if pid is None or not self._process.is_alive():
            return
        if hasattr(os, "getpgid"):
            try:
                if os.getpgid(pid) == pid:  # it leads its own group once it runs our code
                    os.killpg(pid, signal.SIGKILL)
                    return
            except ProcessLookupError:
                return
        self._process.kill()

    def _ask(self, method: str, arguments: dict[str, Any]) -> Any:
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise self._died() from error
        return self._receive()

    def _receive(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if ok:
            return value
        summary, text = value
        raise CallError(summary) from RemoteTracebackError(text)

    def _died(self) -> CallError:
        with _spawning:
            self._process.join(_CLOSE_SECONDS)
        return CallError(f"found its process dead, with exit code {self._process.exitcode}")

    def _reap(self) -> None:
        self.kill()
        with _spawning:
            self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, build: Callable[[], Any]) -> None:
    """The worker process: say that it is there, then answer calls until the pipe closes."""
    if hasattr(os, "setsid"):
        os.setsid()  # so that a kill reaches what the environment started, and Ctrl-C is the driver's alone
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # One for all calls: what an environment keeps between them (a client, a task) belongs to it.
    loop = asyncio.new_event_loop()
    environment: Any = None
    method = "start"
    arguments: dict[str, Any] = {}
    while True:
        try:
            value: Any = None
            if method == "build":
                environment = build()
            elif method != "start":
                value = invoke(environment, method, arguments)
            if hasattr(value, "__await__"):
                value = loop.run_until_complete(value)
            answer = (True, value)
        except BaseException as error:  # also sys.exit() in an environment
            answer = (False, (raised(error), traceback.format_exc()))
        try:
            try:
                pipe.send(answer)
            except (OSError, EOFError):
                break
            except Exception as error:  # the value cannot be pickled
                pipe.send(
                    (
                        False,
                        (f"returned what cannot be sent to another process: {one_line(error)}", traceback.format_exc()),
                    )
                )
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            break
    loop.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if hasattr(os, "killpg"):
        # With all that the environment started: nobody is left to end it.
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
