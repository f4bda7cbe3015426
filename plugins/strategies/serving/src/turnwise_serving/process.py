"""A server as a process of ours: started on a free port, watched, ended with all that it started."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from turnwise_serving.memory import Memory

FOLDER = "TURNWISE_SERVER_FOLDER"
"""The environment variable by which the server's side (turnwise_child) finds the folder that it removes when its starter was killed."""
TOOLS = "TURNWISE_SERVING_ENGINE"
"""The environment variable with the folder of turnwise_child, for an interpreter that has nothing of Turnwise."""
ENGINE = Path(__file__).with_name("engine")
WORDS = 2**17
"""Bytes of a log in which the reason of its end is looked for."""
# Lines of a log that show no error.
TAIL = 6
# Seconds in which a server that was asked to end does so.
_PATIENCE = 20.0


class ServerProcess:
    """A server of one engine, which ends with us however we end: it holds the other end of its standard input.

    A subclass names the `engine`, its `memory`, and which lines of its log are errors (`error`), which of those only
    point to others (`pointer`) or have their reason on the next line (`headline`), which are the usual ones (`usual`),
    and how many errors are shown.
    """

    engine: ClassVar[str]
    memory: ClassVar[Memory]
    error: ClassVar[re.Pattern[str]]
    pointer: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    headline: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    usual: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    shown: ClassVar[int] = 2

    def __init__(self, port: int) -> None:
        """Make its folder, which nobody else may read; nothing is started."""
        self.url = f"http://127.0.0.1:{port}"
        # Loopback is open to every user of the machine. A subclass hands it over where no other user can read it: not
        # in a command line.
        self.key = secrets.token_urlsafe(32)
        self.folder = Path(tempfile.mkdtemp(prefix=f"turnwise-{self.engine.lower()}-"))
        self.log = self.folder / "server.log"

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, without waiting until it answers. Raises OSError: its program cannot be run."""
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    env={**environment, FOLDER: str(self.folder), TOOLS: str(ENGINE)},
                    # Never written to: the server's side reads from it to learn that this process has ended, even by
                    # SIGKILL.
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A group of its own: Ctrl-C in the driver's terminal reaches the driver, which stops the server in
                    # order.
                    start_new_session=True,
                )
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.pid = self._process.pid
        # No patience at the end of the interpreter: nobody is left to wait for.
        atexit.register(self.stop, 0.0)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def tail(self) -> str:
        """The end of the log on one line: its last errors, else its last lines that say more than the usual ones."""
        try:
            lines = [
                line.strip()
                for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()
                if line.strip()
            ]
        except OSError:
            return "no log"
        pairs = zip(lines, [*lines[1:], ""])
        errors = [
            f"{line} {after}" if self.headline.search(line) else line
            for line, after in pairs
            if self.error.search(line)
        ]
        # Errors that only point to others are better than none.
        errors = [line for line in errors if not self.pointer.search(line)] or errors
        chosen = (
            errors[-self.shown :] or [line for line in lines if not self.usual.search(line)][-TAIL:] or lines[-TAIL:]
        )
        return " | ".join(line[:400] for line in chosen) or "an empty log"

    def words(self) -> str:
        """The end of its log as it is; empty where there is none."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - WORDS))
                return log.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def how_it_ended(self) -> str:
        """`exit code 1` or `signal SIGKILL`, with what the system may have meant by it where the log gives no
        reason."""
        code = self._process.poll()
        if code is not None and code < 0:
            # The system kills without a word where main memory is full.
            silent = -code == signal.SIGKILL and not any(
                self.error.search(line.strip()) for line in self.words().splitlines()
            )
            full = f": if main memory was full, lower {self.memory.host} of actor_infer"
            return f"signal {signal.Signals(-code).name}{full if silent else ''}"
        return f"exit code {code}"

    def stop(self, patience: float = _PATIENCE, keep_log: bool = False) -> None:
        """End it: a request to stop, then after `patience` seconds all that it started by force. Blocks; may be called
        twice."""
        atexit.unregister(self.stop)
        end_tree(self._process, patience)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not keep_log:
            shutil.rmtree(self.folder, ignore_errors=True)


def end_tree(leader: subprocess.Popen[bytes], patience: float) -> None:
    """End the leader of a process group with its group and all its descendants, those in groups of their own too.
    Blocks until it has ended."""
    # Before it ends: afterwards its children are another process's.
    family = _descendants(leader.pid)
    if patience and leader.poll() is None:
        leader.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(patience)
        # It may have started more while it ended.
        family += _descendants(leader.pid)
    # The leader began a session, so its pid is that of a group in which nobody else is.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    for process in family:
        # psutil knows a process by its start too, so that none is hit that was given an old number.
        with contextlib.suppress(psutil.Error):
            process.kill()
    leader.wait()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def visible(devices: Sequence[int]) -> str:
    """The role's devices for CUDA_VISIBLE_DEVICES, as the environment names them: positions within what this process
    may see."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(seen[number] if number < len(seen) else str(number) for number in devices)
