"""One SGLang server as a process of ours, in the interpreter that has SGLang."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import MachineError
from turnwise_serving.process import ServerProcess
from turnwise_sglang.arguments import LAUNCHER
from turnwise_sglang.memory import MEMORY

_SHARED = Path("/dev/shm")


class Server(ServerProcess):
    """A running server process."""

    engine = "SGLang"
    memory = MEMORY
    error = re.compile(r"^([\w.]*(Error|Exception|Interrupt)\b.*:|.*\b(out of memory|OOM)\b)", re.IGNORECASE)
    usual = re.compile(r"INFO|WARNING|GET /|POST /")

    def __init__(self, python: str, arguments: Mapping[str, Any], environment: Mapping[str, str], port: int) -> None:
        """Start it, without waiting until it answers. Raises MachineError: the interpreter cannot be run."""
        super().__init__(port)
        (self.folder / "tmp").mkdir()
        written = self.folder / "arguments.json"
        # In the folder, which nobody else may read, because it holds the key: a command line is open to all users.
        written.write_text(json.dumps({**arguments, "api_key": self.key}), encoding="utf-8")
        try:
            self.start([python, str(LAUNCHER), "serve", str(written)], environment)
        except OSError as error:
            raise MachineError(
                f"SGLang's interpreter {python!r} cannot be run: {error}. Fix: correct strategy_config.python"
            ) from error

    def stop(self, patience: float = 0.0, keep_log: bool = False) -> None:
        """As every server; and remove what SGLang leaves in shared memory."""
        super().stop(patience, keep_log)
        # The launcher gave them the folder's name.
        for path in _SHARED.glob(f"sglang_loads_{self.folder.name}_*"):
            path.unlink(missing_ok=True)
