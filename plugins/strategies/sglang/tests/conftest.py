"""One backend with one server of its own for the whole session, on an event loop of its own; it begins with random
weights."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from attrs import frozen

from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig

# sglang_fakes: the suite runs in importlib mode, where folders of tests are on no path.
sys.path.insert(0, str(Path(__file__).parent))

LONGEST = 240.0


@frozen
class Life:
    """The session's backend and `run`, which runs a coroutine on its loop."""

    backend: SglangBackend
    run: Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def life() -> Iterator[Life]:
    config = SglangConfig(python=fixtures.interpreter(), load_format="dummy", start_timeout=LONGEST)
    with asyncio.Runner() as runner:

        def run(work: Coroutine[Any, Any, Any]) -> Any:
            return runner.run(asyncio.wait_for(work, LONGEST))

        async def build() -> SglangBackend:
            return SglangBackend(config, fixtures.context())

        backend = run(build())
        yield Life(backend, run)
        run(backend.close())


@pytest.fixture
def shared() -> Callable[[int], set[Path]]:
    """What the processes of a group have of /dev/shm in their memory."""

    def found(group: int) -> set[Path]:
        paths = set()
        for process in psutil.pids():
            try:
                if os.getpgid(process) == group:
                    # psutil's own maps count the pages of each, which takes seconds for an engine.
                    lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
                    paths |= {
                        Path(line.split(maxsplit=5)[5])
                        for line in lines
                        if "/dev/shm/" in line and not line.endswith("(deleted)")
                    }
            except OSError:
                continue
        return paths

    return found


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """`run(work)`: a coroutine on the module's own loop, in at most its LONGEST seconds."""
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, request.module.LONGEST))
