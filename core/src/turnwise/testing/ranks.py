"""The processes of one training role, for tests: started together, and ended together where one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

GRACE_SECONDS = 10.0
"""After one rank failed: how long the others may take to notice it."""
_SHOWN = 3000


def run_ranks(
    command: Callable[[int], Sequence[str]],
    size: int,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> tuple[list[int], str]:
    """Run `command(rank)` for every rank below `size`: the exit codes, and the end of what each wrote to its terminal.

    A rank that fails leaves others waiting for it: after GRACE_SECONDS they are terminated (code -15), as all are after
    `timeout` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"said-{rank}.txt" for rank in range(size)]
    ranks = []
    for rank, log in enumerate(logs):
        # Into files: a pipe that nobody reads would fill up and stop the rank.
        with log.open("wb") as said:
            ranks.append(
                subprocess.Popen(
                    command(rank), stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
                )
            )
    deadline = time.monotonic() + timeout
    failed = False
    try:
        while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
            # The others wait in a collective that the failed one never joins: a little time lets them report it.
            if any(codes) and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        for process in ranks:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                # It does not listen to SIGTERM, as in a collective of a library's.
                process.kill()
                process.wait()
    return [process.returncode for process in ranks], "\n".join(
        f"{log.name}: {log.read_text(errors='replace')[-_SHOWN:]}" for log in logs
    )
