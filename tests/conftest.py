"""Whole runs for the tests that cross distributions: two small configurations, run here or in a process of their
own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from attrs import frozen
from click.testing import CliRunner, Result

from turnwise.cli.main import main
from turnwise.plugins import reset_registry
from turnwise.testing.runs import COUNTING, FAKES, LAKE, UNTIMED, written
from turnwise.testing.ticks import run_in_ticks

# Its scripts, of which the tests run samples, are imported by name, as they import one another.
sys.path.insert(0, str(Path(__file__).parent))

AT = Path(__file__).with_name("at.py")
IDLE = re.compile(r"While there was a batch to play ahead, the trainer was idle.*\n")
"""What time makes of a report."""

FAKE = written(FAKES, {**COUNTING, "eval_steps": 3, "save_steps": 2})
SMALL_LAKE = written(
    LAKE,
    {
        "max_steps": 6,
        "eval_steps": 3,
        "save_steps": 2,
        "rollout_batch_size": 16,
        "pg_variant": "ppo",
        "kl_loss_coef": 0.01,
        "entropy_loss_coef": {"start": 0.01, "end": 0.0},
        "actor_train.training_args.lr_scheduler_type": "linear",
        "actor_train.training_args.gradient_accumulation_steps": 2,
        "train_env_manager.num_env_groups": 4,
        "val_env_manager": {"num_env_groups": 16, "group_size": 1, "tags": ["Lake"]},
        "baselines": ["random"],
    },
)


@frozen
class Run:
    """A configuration in a folder of its own, which is the current folder of everything that is run."""

    folder: Path
    yaml: Path

    def command(self, *arguments: str, input: str | None = None) -> Result:
        """`turnwise ARGUMENTS` in this process; `run.yaml` names the configuration."""
        here = Path.cwd()
        os.chdir(self.folder)
        try:
            return CliRunner().invoke(main, list(arguments), input=input)
        finally:
            os.chdir(here)

    def train(self, *overrides: str, ticks: bool = False) -> Result:
        """`turnwise train run.yaml OVERRIDES` in this process; it must succeed. `ticks`: on a clock of ticks
        (turnwise.testing.ticks), which needs the fake runtime."""
        with mock.patch("asyncio.run", run_in_ticks) if ticks else contextlib.nullcontext():
            result = self.command("train", "run.yaml", *overrides)
        assert result.exit_code == 0, result.output + repr(result.exception)
        return result

    def process(
        self, *arguments: str, at: tuple[str, int, str] | None = None, timeout: float = 120, ticks: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """`turnwise ARGUMENTS` in a process of its own, which does something to itself at the nth call of a function
        (see at.py). `ticks`: as in `train`, with `at` alone."""
        before = [str(AT), *map(str, at)] if at else ["-m", "turnwise.cli.main"]
        return subprocess.run(
            [sys.executable, *before, *arguments],
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | ({"TURNWISE_TEST_TICKS": "1"} if ticks else {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def metrics(self, out: str = "out", timed: bool = False) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without what time makes of them."""
        lines = [json.loads(line) for line in (self.folder / out / "metrics.jsonl").read_text().splitlines()]
        return lines if timed else [{k: v for k, v in line.items() if not k.startswith(UNTIMED)} for line in lines]

    def trajectories(self, split: str, out: str = "out") -> str:
        """The whole file of trajectories."""
        return (self.folder / out / "trajectories" / f"{split}.jsonl").read_text()

    def checkpoints(self, out: str = "out") -> list[int]:
        """The steps of the checkpoints; nothing else may lie in their folder."""
        names = sorted(p.name for p in (self.folder / out / "checkpoints").iterdir())
        return [int(name.removeprefix("checkpoint-")) for name in names]

    def same(self, other: Run, out: str = "out", theirs: str = "out") -> None:
        """Assert that two runs left the same metrics and trajectories, to the last bit, and the same report."""
        assert self.metrics(out) == other.metrics(theirs)
        for split in ("train", "val"):
            assert self.trajectories(split, out) == other.trajectories(split, theirs)
        report, expected = (
            IDLE.sub("", (run.folder / name / "report.md").read_text()) for run, name in ((self, out), (other, theirs))
        )
        assert report.replace(f"{out}/", "") == expected.replace(f"{theirs}/", "")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Torch computes with one thread, here as in the processes that the tests start: sums depend on it in the last
    bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    """What a test declares or breaks is gone after it."""
    reset_registry()
    yield
    reset_registry()


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """`make_run(yaml)`: a run in a new folder."""

    def make(yaml: str) -> Run:
        folder = tmp_path_factory.mktemp("run")
        (folder / "run.yaml").write_text(yaml)
        return Run(folder, folder / "run.yaml")

    return make


@pytest.fixture
def fake(make_run: Callable[[str], Run]) -> Run:
    """A run of the fakes alone: no torch, half a second."""
    return make_run(FAKE)


@pytest.fixture
def lake(make_run: Callable[[str], Run]) -> Run:
    """A run of the real plugins on FrozenLake with a tiny model: two seconds."""
    return make_run(SMALL_LAKE)


@pytest.fixture(scope="session")
def make_lake(make_run: Callable[[str], Run]) -> Callable[[], Run]:
    """`make_lake()`: what `lake` is, for fixtures of a wider scope."""
    return lambda: make_run(SMALL_LAKE)


@pytest.fixture(scope="session")
def make_fake(make_run: Callable[[str], Run]) -> Callable[[], Run]:
    """`make_fake()`: what `fake` is, for fixtures of a wider scope."""
    return lambda: make_run(FAKE)


@pytest.fixture(scope="session")
def whole_fake(make_run: Callable[[str], Run]) -> Run:
    """The fakes' run, uninterrupted."""
    reset_registry()
    run = make_run(FAKE)
    run.train()
    return run


@pytest.fixture(scope="session")
def whole_lake(make_run: Callable[[str], Run]) -> Run:
    """The real run, uninterrupted."""
    reset_registry()
    run = make_run(SMALL_LAKE)
    run.train()
    return run
