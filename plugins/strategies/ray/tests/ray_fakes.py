"""A plugin for the tests: roles and environments on numpy that report where they are, and die or hang when asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from turnwise import Implementation, hookimpl
from turnwise.contracts.inference import DeviceMemory, InferenceContext, Request
from turnwise.contracts.train import Offer, StrategyCapabilities, TrainContext
from turnwise.data.rows import Update, UpdateResult
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineLost, TrainerError
from turnwise.testing.fake_model import FakeBackend, FakeBackendConfig, FakeStrategy
from turnwise.testing.fakes import FakeEnvironment


@frozen
class RankedConfig:
    """`model_parallel`: ranks that share the rows."""

    model_parallel: int = 1

    @property
    def capabilities(self) -> StrategyCapabilities:
        """The arithmetic below."""
        return StrategyCapabilities(data_parallel_size=self.data_parallel_size)

    def data_parallel_size(self, world: int) -> int:
        """Ranks that see different rows."""
        return world // self.model_parallel


class Ranked(FakeStrategy):
    """The bigram's trainer in many ranks, which never speak to each other."""

    def __init__(self, config: RankedConfig, context: TrainContext) -> None:
        super().__init__(None, context)
        self.seen: list[int] = []
        self.context = context
        part = context.ranks.rank // config.model_parallel
        self.data_parallel = (part, context.ranks.size // config.model_parallel)

    def update(self, update: Update) -> UpdateResult:
        """The loss of the own rows."""
        self.seen.append(len(update.rows))
        return super().update(update)

    def facts(self) -> dict[str, Any]:
        """What rank 0 knows of its process."""
        names = ("MARK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS")
        return {
            "ranks": self.context.ranks,
            "devices": self.context.devices,
            "cwd": os.getcwd(),
            **{n: os.environ.get(n) for n in names},
        }

    def write(self, folder: Path) -> None:
        """A file per rank: its own facts and the rows that it saw."""
        (folder / f"{self.context.ranks.rank}.txt").write_text(
            f"{self.context.ranks.local_rank} {sum(self.seen)} {os.getpid()}"
        )

    def misbehave(self, what: str, rank: int) -> None:
        """What `rank` does; the others wait for it as in a collective operation."""
        if self.context.ranks.rank != rank:
            time.sleep(600 if what in ("hang", "die", "talk") else 0)
        elif what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(600)
        elif what == "fail":
            raise TrainerError("out of chalk. Fix: buy chalk")
        elif what == "talk":
            logging.getLogger("turnwise").info("the chalk squeaks")
            time.sleep(600)
        else:
            raise KeyError("odd")


class Noted(FakeStrategy):
    """The bigram's trainer; what moves it, and what it sends and saves, is noted. It logs its updates, and prints when it
    is built: what is printed goes by files that Ray reads now and then, and reads no more once the run has ended."""

    def __init__(self, config: None, context: TrainContext) -> None:
        super().__init__(config, context)
        print("chalk dust", flush=True)

    def update(self, update: Update) -> UpdateResult:
        """One gradient step."""
        logging.getLogger("turnwise").info("wrote with chalk")
        return super().update(update)

    def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """A copy of the weights."""
        _note("actor_train.offer")
        return super().offer(transport, version, receivers)

    def save(self, folder: Path) -> None:
        """Everything in one file."""
        _note("actor_train.save")
        super().save(folder)

    def offload(self) -> None:
        """Off the device."""
        _note("actor_train.offload")

    def onload(self) -> None:
        """On the device."""
        _note("actor_train.onload")


class NotedSampler(FakeBackend):
    """The bigram's sampler; what moves it, and that it takes weights, is noted."""

    async def receive(self, offer: Offer) -> int:
        """Take the weights."""
        _note("actor_infer.receive")
        return await super().receive(offer)

    async def sleep(self) -> None:
        """Off the device."""
        _note("actor_infer.sleep")

    async def wake(self, what: DeviceMemory) -> None:
        """On the device."""
        _note(f"actor_infer.wake({what})")


def _note(what: str) -> None:
    """A line in the file `order` of the folder where all processes begin."""
    with Path("order").open("a") as file:
        file.write(f"{what}\n")


class Mortal(FakeBackend):
    """A sampler that dies once at a request for `die_once` (a path in MORTAL that is not there yet)."""

    def __init__(self, config: FakeBackendConfig, context: InferenceContext) -> None:
        super().__init__(config, context)

    async def generate(self, request: Request) -> Generation:
        """Sample, or die."""
        _die_once("MORTAL_ENGINE", at=request.seed % 3 == 0)
        generation = await super().generate(request)
        return Generation(
            generation.text,
            generation.ids,
            generation.logprobs,
            generation.versions,
            generation.finish,
            {"pid": os.getpid(), "sum": self._sum()},
        )

    def _sum(self) -> float:
        return float(np.sum(self._weights))


class Losing(FakeBackend):
    """A sampler whose engine ends once in a method, where there is a file LOSE_ with its name; its process goes on, and
    reports every call to it."""

    def __init__(self, config: FakeBackendConfig, context: InferenceContext) -> None:
        super().__init__(config, context)
        self._gone = False

    def _perhaps(self, method: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # no engine is to end, or another one was faster
            Path(f"LOSE_{method}").rename(f"lost_by_{os.getpid()}")
            self._gone = True
        if self._gone:
            raise EngineLost("the engine ran out of steam. Fix: more coal")

    async def generate(self, request: Request) -> Generation:
        """Sample, or report the end."""
        self._perhaps("generate")
        generation = await super().generate(request)
        extras = {"pid": os.getpid(), "sum": float(np.sum(self._weights))}
        return Generation(
            generation.text, generation.ids, generation.logprobs, generation.versions, generation.finish, extras
        )

    async def pause(self) -> None:
        """Pause, or report the end."""
        self._perhaps("pause")
        await super().pause()

    async def receive(self, offer: Offer) -> int:
        """Take the weights, or report the end; the engine that takes the file STUCK takes weights for ever."""
        taking = Path(f"taking_{os.getpid()}")
        try:
            Path("STUCK").rename(taking)
        except FileNotFoundError:
            pass
        else:
            try:
                await asyncio.sleep(600)
            finally:
                taking.rename(f"gave_up_{os.getpid()}")
        self._perhaps("receive")
        return await super().receive(offer)

    async def close(self) -> None:
        """Leave a trace."""
        Path(f"closed_by_{os.getpid()}").touch()
        await super().close()


class MortalEnvironment(FakeEnvironment):
    """The counting game, which ends its process once at a step (MORTAL_ENVIRONMENT), or stops it
    (STOPPED_ENVIRONMENT)."""

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, or the end."""
        _die_once("MORTAL_ENVIRONMENT", at=self._turn == 1)
        _die_once("STOPPED_ENVIRONMENT", at=self._turn == 1, by=signal.SIGSTOP)
        return super().step(action)


class FickleEnvironment(FakeEnvironment):
    """The counting game, which never shows the same twice."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, and say when."""
        observation, info = super().reset(seed=seed, options=options)
        return f"{observation} at {time.time_ns()}", info


def _die_once(name: str, at: bool, by: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal at the first of all calls with `at`, in whichever process; the variable names the file
    by which all know."""
    path = os.environ.get(name) or _named(name)
    if not path or not at:
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), by)


def _named(name: str) -> str | None:
    """In a worker without the variable: the file `NAME` in the current folder holds the path."""
    note = Path(name)
    return note.read_text() if note.is_file() else None


@hookimpl
def train_strategies() -> list[Implementation]:
    """`ranked` and `noted`."""
    return [
        Implementation("ranked", Ranked, RankedConfig, summary="the bigram's trainer in many ranks"),
        Implementation("noted", Noted, summary="the bigram's trainer, with notes"),
    ]


@hookimpl
def inference_backends() -> list[Implementation]:
    """`mortal`, `losing` and `noted`."""
    return [
        Implementation("mortal", Mortal, FakeBackendConfig, summary="a sampler that can die"),
        Implementation("losing", Losing, FakeBackendConfig, summary="a sampler that can lose its engine"),
        Implementation("noted", NotedSampler, FakeBackendConfig, summary="a sampler with notes"),
    ]


@hookimpl
def environments() -> list[Implementation]:
    """`mortal_env` and `fickle_env`."""
    return [
        Implementation("mortal_env", MortalEnvironment, summary="a game that can end its process"),
        Implementation("fickle_env", FickleEnvironment, summary="a game that is never the same"),
    ]
