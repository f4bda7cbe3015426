"""One SGLang server as a process of ours: started on a free port, watched, stopped by its own process group."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import MachineError
from turnwise_sglang.arguments import LAUNCHER

TAIL = 6
WORDS = 2**17
"""Bytes of a log in which the reason of its end is looked for."""
_MEMORY = Path("/dev/shm")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b.*:|.*\b(out of memory|OOM)\b", re.IGNORECASE)
_USUAL = re.compile(r"INFO|WARNING|GET /|POST /")


class Server:
    """A running server process. Its log is a file; `tail` is what an error shows of it."""

    def __init__(self, python: str, arguments: Mapping[str, Any], environment: Mapping[str, str], port: int) -> None:
        """Start it, without waiting until it answers. Raises MachineError: the interpreter cannot be run."""
        self.url = f"http://127.0.0.1:{port}"
        self._folder = Path(tempfile.mkdtemp(prefix="turnwise-sglang-"))
        self.log = self._folder / "server.log"
        (self._folder / "tmp").mkdir()
        told = self._folder / "arguments.json"
        told.write_text(json.dumps(arguments), encoding="utf-8")
        try:
            with self.log.open("wb") as log:
                # A group of its own: Ctrl-C in the driver's terminal reaches the driver, which stops the server in order.
                self._process = subprocess.Popen(
                    [python, str(LAUNCHER), "serve", str(told)],
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise MachineError(f"SGLang's interpreter {python!r} cannot be run: {error}. Fix: correct strategy_config.python") from error
        self.pid = self._process.pid
        atexit.register(self.stop, 0.0)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def tail(self) -> str:
        """The end of the log on one line: its last errors, else its last lines that tell more than the usual ones."""
        try:
            lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        except OSError:
            return "no log"
        errors = [line for line in lines if _ERROR.match(line)]
        telling = errors[-2:] or [line for line in lines if not _USUAL.search(line)][-TAIL:] or lines[-TAIL:]
        return " | ".join(line[:400] for line in telling) or "an empty log"

    def words(self) -> str:
        """The end of its log as it is; empty where there is none."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - WORDS))
                return log.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def how_it_ended(self) -> str:
        """`exit code 1` or `signal SIGKILL`, with what the system may have meant by it where the log tells no reason (SGLang kills itself so)."""
        code = self._process.poll()
        if code is not None and code < 0:
            silent = -code == signal.SIGKILL and not any(_ERROR.match(line.strip()) for line in self.words().splitlines())
            full = ": if main memory was full, lower engine_args.max_total_tokens or max_running_requests of actor_infer"
            return f"signal {signal.Signals(-code).name}{full if silent else ''}"
        return f"exit code {code}"

    def stop(self, patience: float, keep_log: bool = False) -> None:
        """End it: a request to stop, then after `patience` seconds the whole group by force. Blocks; may be called twice."""
        atexit.unregister(self.stop)
        if self.alive and patience:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + patience
            while self.alive and time.monotonic() < deadline:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for path in _MEMORY.glob(f"sglang_loads_{self._folder.name}_*"):  # so named by the launcher
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder if not keep_log else self._folder / "tmp", ignore_errors=True)
