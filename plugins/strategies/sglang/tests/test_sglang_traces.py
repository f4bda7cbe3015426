"""What is left of a server when the run that started it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.ports import free_port

pytestmark = [pytest.mark.engines, pytest.mark.matrix]


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def test_a_server_whose_run_is_killed_leaves_nothing(short: Path, shared: Any) -> None:
    code = (
        "import sys, time; from turnwise_sglang import fixtures as f; from turnwise_sglang.server import Server; from"
        " turnwise_sglang.arguments import environment, server_arguments; from turnwise_sglang.config import"
        " SglangConfig; c = SglangConfig(python=f.interpreter()); s = Server(c.python, server_arguments(c, f.context(),"
        " int(sys.argv[1])), environment(c, f.context()), int(sys.argv[1])); print(f'group={s.pid}', flush=True);"
        " time.sleep(300)"
    )
    command = [sys.executable, "-c", code, str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(short)}) as run:
        assert run.stdout is not None
        # Others may print before: DeepSpeed tells of its accelerator when transformers finds it.
        group = next(int(line.removeprefix("group=")) for line in run.stdout if line.startswith("group="))
        deadline = time.monotonic() + 200
        while not any(path.name.startswith("sglang_loads_") for path in shared(group)) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = shared(group)
        sockets = [path for path in short.rglob("*") if path.is_socket()]
        assert list(short.glob("turnwise-sglang-*/server.log"))
        run.kill()
    while shared(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left
    assert sockets
    assert [path for path in [*left, *sockets] if path.exists()] == []
    assert not list(short.glob("turnwise-sglang-*/server.log"))
