"""Asynchronous runs on Ray that are killed at random moments: `python tests/killed_ray_runs.py [KILLS] [SEED]`.

As tests/killed_runs.py, with `weight_update: between_tokens`: one process trains and one samples, token by token, and
the driver gets SIGKILL, and after it whatever of Ray it leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import psutil
from killed_runs import PHASES, Target, by_hand

MARK = "TURNWISE_KILLED_RUN"
"""In the environment of every process of a run: the run's folder."""
PLUGIN = """\
import asyncio, time
from turnwise import Implementation, hookimpl
from turnwise.testing.fakes import FakeBackend, FakeBackendConfig, FakeStrategy

class Slow(FakeStrategy):
    def update(self, update):
        time.sleep(0.1)
        return super().update(update)
    def save(self, folder):
        time.sleep(0.1)
        super().save(folder)

class SlowToReceive(FakeBackend):
    async def receive(self, offer):
        await asyncio.sleep(0.1)
        return await super().receive(offer)

@hookimpl
def train_strategies():
    return [Implementation("slow", Slow)]

@hookimpl
def inference_backends():
    return [Implementation("slow", SlowToReceive, FakeBackendConfig)]
"""
SETTINGS = (
    "plugins=[turnwise.testing.plugin, turnwise-ray, ./slow.py]",
    "runtime={use: ray, device: cpu, object_store_mb: 80}",
    "actor_train.strategy_args.strategy_name=slow",
    "actor_train.device_mapping=[0]",
    "actor_infer.strategy_args={strategy_name: slow, strategy_config: {delay: 0.05, token: 0.05}}",
    "actor_infer.device_mapping=[1]",
)
IN_THE_DRIVER = {
    "training": "turnwise_ray.trainer:RayRole.update",
    "publishing": "turnwise_ray.backend:RayBackend.receive",
}


def prepared(folder: Path) -> None:
    """The plugin of one file that every process of the run loads."""
    (folder / "slow.py").write_text(PLUGIN, encoding="utf-8")


def began(folder: Path) -> None:
    """By this the processes of the run are known, and here is what Ray writes."""
    os.environ[MARK] = str(folder)
    os.environ["RAY_TMPDIR"] = str(_place(folder))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def ended(folder: Path) -> None:
    """Nothing of the run is left."""
    while left := _processes(folder):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)
    shutil.rmtree(_place(folder), ignore_errors=True)


def _place(folder: Path) -> Path:
    place = Path("/tmp", f"killed-{os.stat(folder).st_ino}")  # the names of Ray's sockets must be short
    place.mkdir(exist_ok=True)
    return place


def _processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


TARGET = Target(
    way="between_tokens",
    name="between_tokens on ray",
    overrides=SETTINGS,
    phases={**PHASES, **IN_THE_DRIVER},
    prepared=prepared,
    began=began,
    ended=ended,
    seconds=300,
    started=True,
    again=0.75,
)

if __name__ == "__main__":
    sys.exit(1 if by_hand([TARGET], *map(int, sys.argv[1:3])) else 0)
