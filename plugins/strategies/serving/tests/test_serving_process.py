"""Servers as processes: their end with all that they started, their last words, and what a starter that was killed
leaves."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from turnwise.errors import EngineError
from turnwise.ports import free_port
from turnwise_serving.health import until_healthy
from turnwise_serving.http import Client
from turnwise_serving.memory import UPDATE, Memory
from turnwise_serving.process import ENGINE, ServerProcess, visible

MEMORY = Memory("share", "share or batch", r"no cache", "lower batch", {UPDATE: ("weight",)}, "batch")
SLEEP = "import time; time.sleep(300)"


class Server(ServerProcess):
    """Whatever runs a line of Python."""

    engine = "Warp"
    memory = MEMORY
    error = re.compile(r"Error: ")
    pointer = re.compile("see above")
    headline = re.compile("on the next line")
    usual = re.compile("INFO")

    def __init__(self, code: str) -> None:
        super().__init__(free_port())
        self.start([sys.executable, "-c", code], {})


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not found():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_stopping_ends_a_descendant_that_left_the_servers_process_group() -> None:
    started = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True);"
        " print(p.pid, flush=True)"
    )
    server = Server(f"{started}; {SLEEP}")
    until(lambda: bool(server.words()))
    child = psutil.Process(int(server.words()))
    server.stop(0.5)
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert not server.alive
    assert not server.folder.exists()
    server.stop(0.5)


def test_a_server_is_asked_to_end_before_it_is_killed() -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up', flush=True);"
        " time.sleep(300)"
    )
    server = Server(code)
    until(lambda: "up" in server.words())
    server.stop(20.0, keep_log=True)
    assert server.how_it_ended() == "exit code 7"
    assert server.log.exists()


def test_nobody_else_may_read_a_servers_folder() -> None:
    server = Server("")
    assert server.folder.stat().st_mode & 0o077 == 0
    server.stop()


def test_every_server_has_a_key_of_its_own_which_no_command_line_shows() -> None:
    servers = [Server(SLEEP) for _ in range(2)]
    assert len({server.key for server in servers}) == 2
    for server in servers:
        assert len(server.key) >= 32
        assert not any(server.key in word for word in psutil.Process(server.pid).cmdline())
        server.stop(0.0)


@pytest.mark.parametrize(
    ("log", "tail"),
    [
        ("INFO up\nA Error: 1\nB Error: 2\nC Error: 3\nError: see above", "B Error: 2 | C Error: 3"),
        ("Error: on the next line\n  why\nlater", "Error: on the next line why"),
        ("INFO up\none\nINFO two", "one"),
        ("INFO up", "INFO up"),
        ("", "an empty log"),
    ],
)
def test_the_end_of_a_log_is_its_last_errors_or_what_says_most(log: str, tail: str) -> None:
    server = Server("")
    until(lambda: not server.alive)
    server.log.write_text(log, encoding="utf-8")
    assert server.tail() == tail
    server.stop()
    assert server.tail() == "no log"
    assert server.words() == ""


@pytest.mark.parametrize(("log", "hinted"), [("", True), ("Error: a reason", False)])
def test_a_server_that_was_killed_without_a_word_may_have_filled_main_memory(log: str, hinted: bool) -> None:
    server = Server(f"print({log!r}, flush=True); {SLEEP}")
    until(lambda: log in server.words())
    psutil.Process(server.pid).kill()
    until(lambda: not server.alive)
    assert (
        server.how_it_ended()
        == f"signal SIGKILL{': if main memory was full, lower batch of actor_infer' if hinted else ''}"
    )
    server.stop()


@pytest.mark.parametrize(
    ("code", "timeout", "closed", "why"),
    [
        (
            "import sys; sys.exit('Error: no cache left')",
            60.0,
            False,
            "no memory left for the cache, in the start of actor_infer: Warp did",
        ),
        (
            SLEEP,
            0.1,
            False,
            r"Warp did not answer within start_timeout = 0\.1 s, log .*Fix: raise strategy_config.start_timeout",
        ),
        (SLEEP, 60.0, True, "the backend was closed"),
    ],
)
def test_waiting_for_a_server_ends_when_it_cannot_come_up(code: str, timeout: float, closed: bool, why: str) -> None:
    async def scene() -> None:
        client = Client(server.url, 5.0)
        try:
            with pytest.raises(EngineError, match=why):
                await until_healthy(server, client, timeout, lambda: closed)
        finally:
            await client.close()

    server = Server(code)
    asyncio.run(scene())
    server.stop(0.0)


def test_a_server_ends_with_a_starter_that_was_killed_and_its_folder_goes(tmp_path: Path) -> None:
    child = (
        f"import sys, time; sys.path.append({str(ENGINE)!r}); import turnwise_child as c; c.end_with_the_starter();"
        " time.sleep(300)"
    )
    starter = f"""
import os, re, sys
from turnwise_serving.memory import Memory
from turnwise_serving.process import ServerProcess
class Server(ServerProcess):
    engine, error = "Warp", re.compile("Error")
server = Server(1)
server.start([sys.executable, "-c", {child!r}], os.environ)
print(server.pid, server.folder, flush=True)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 9, done.stderr
    pid, folder = done.stdout.split()
    until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    assert not Path(folder).exists()


def test_devices_are_positions_within_what_this_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible((1, 2)) == "1,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6")
    assert visible((0, 2, 7)) == "4,6,7"
