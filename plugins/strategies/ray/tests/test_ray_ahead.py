"""Whole asynchronous runs of a tiny FrozenLake on Ray: weights that come while episodes are open, and processes that
die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from turnwise.testing.runs import LAKE, written

pytest.importorskip("ray", reason="ray is not installed")

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, GROUPS, SIZE = 4, 2, 4
CHANGES = {
    "max_steps": STEPS,
    "eval_steps": 2,
    "sequence_length": 512,
    "async_generation_ratio": 1,
    "actor_train.device_mapping": [0],
    "actor_infer.device_mapping": [1],
    "actor_infer.generating_args.max_new_tokens": 16,
    "val_env_manager": {"num_env_groups": 2, "group_size": 1, "tags": ["Lake"]},
    "runtime": {"use": "ray", "device": "cpu", "object_store_mb": 100},
}


def ended(running: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and stderr."""
    _, told = running.communicate(timeout=240)
    return running.returncode, told


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return Ahead(tmp_path)


class Ahead:
    """Runs in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write()

    def write(self, *plugins: str, **changes: Any) -> None:
        """The configuration, with further plugins; a dot in a key is written as two underscores."""
        keys = {"plugins": ["turnwise-ray", *LAKE["plugins"], *plugins]} | CHANGES
        text = written(LAKE, keys | {key.replace("__", "."): value for key, value in changes.items()})
        (self.folder / "run.yaml").write_text(text)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """A run, as the command line begins one."""
        return subprocess.Popen(
            [sys.executable, "-m", "turnwise.cli.main", "train", "run.yaml", *overrides],
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, *overrides: str) -> tuple[int, str]:
        """Exit code of a run, and what it wrote to stderr."""
        return ended(self.start(*overrides))

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """A file of JSON lines."""
        return [json.loads(line) for line in (self.folder / "out" / name).read_text().splitlines()]

    def log(self) -> str:
        """What the driver logged."""
        return (self.folder / "out" / "run.log").read_text()

    def is_whole(self, ratio: int = 1, steps: int = STEPS) -> None:
        """Every episode was trained once, no token older than the bound, and every evaluation had one version."""
        trained = sorted((one["step"], one["group"], one["member"]) for one in self.lines("trajectories/train.jsonl"))
        assert trained == [(q, q * GROUPS + s, m) for q in range(steps) for s in range(GROUPS) for m in range(SIZE)]
        lines = self.lines()
        assert [line["step"] for line in lines] == list(range(steps + 1))
        assert all(line["async/staleness/max"] <= ratio for line in lines[:-1])
        evaluated = [line["val/version_span"] for line in lines if "val/version_span" in line]
        assert evaluated
        assert set(evaluated) == {0}


@pytest.mark.parametrize(("way", "workers"), [("between_turns", 2), ("between_tokens", 0)])
def test_weights_that_come_while_episodes_are_open(run: Ahead, way: str, workers: int) -> None:
    code, told = run.train(f"weight_update={way}", f"runtime.env_workers={workers}")
    assert code == 0, told
    run.is_whole()
    assert max(line["async/staleness/max"] for line in run.lines()[:-1]) == 1
    assert all(line["async/version_span"] <= (way == "between_tokens") for line in run.lines()[:-1])
    assert "Traceback" not in told


DYING = """\
import os, signal
from pathlib import Path
from turnwise import Implementation, hookimpl
from turnwise_hf.backend import HfBackend
from turnwise_hf.config import HfConfig
from turnwise_torch.config import TorchConfig
from turnwise_torch.strategy import TorchStrategy

class Noted(HfBackend):
    def __init__(self, config, context):
        super().__init__(config, context)
        Path("sampler").write_text(str(os.getpid()))

class Dying(TorchStrategy):
    # Ends the process that is named in the file AIMED_AT, once, in the second step.
    asked = 0
    def update(self, update):
        self.asked += 1
        if self.asked == 3 and Path("AIMED_AT").exists():
            who = Path("AIMED_AT").read_text()
            Path("AIMED_AT").unlink()
            os.kill(os.getpid() if who == "trainer" else int(Path(who).read_text()), signal.SIGKILL)
        return super().update(update)

@hookimpl
def train_strategies():
    return [Implementation("dying", Dying, TorchConfig)]

@hookimpl
def inference_backends():
    return [Implementation("noted", Noted, HfConfig)]
"""


def aimed(run: Ahead, who: str) -> None:
    """A run in which this process gets SIGKILL while the second step is trained."""
    (run.folder / "dying.py").write_text(DYING)
    (run.folder / "AIMED_AT").write_text(who)
    run.write(
        "./dying.py",
        actor_train__strategy_args__strategy_name="dying",
        actor_infer__strategy_args__strategy_name="noted",
    )


@pytest.mark.parametrize(("way", "workers"), [("between_batches", 0), ("between_turns", 2), ("between_tokens", 2)])
def test_the_only_engine_dies_while_the_trainer_trains_and_the_run_goes_on(run: Ahead, way: str, workers: int) -> None:
    aimed(run, "sampler")
    code, told = run.train(f"weight_update={way}", f"runtime.env_workers={workers}")
    assert code == 0, told
    run.is_whole()
    assert "actor_infer.0 died: " in run.log()
    assert "actor_infer.0 waits for the next weights, and every request for it" in run.log()


def test_the_trainer_dies_and_the_checkpoint_goes_on(run: Ahead) -> None:
    aimed(run, "trainer")
    ahead = ["weight_update=between_tokens", "runtime.env_workers=2"]
    code, told = run.train(*ahead)
    assert code == 1, told
    (error,) = (line for line in told.splitlines() if line.startswith("error: "))
    assert "the process died in update" in error
    assert "saved: out/checkpoints/checkpoint-000001" in told
    assert told.splitlines()[-1].startswith("resume: ")
    assert "Traceback" not in told
    code, resumed = run.train(*ahead, "resume_from_checkpoint=true")
    assert code == 0, resumed
    run.is_whole()


def test_interrupted_with_open_episodes_the_run_goes_on_from_their_records(run: Ahead) -> None:
    ahead = ["weight_update=between_turns", "runtime.env_workers=2"]
    running = run.start(*ahead)
    metrics = run.folder / "out" / "metrics.jsonl"
    while running.poll() is None and not (metrics.exists() and run.lines()):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    code, told = ended(running)
    assert code == 130, told
    assert "Traceback" not in told
    code, resumed = run.train(*ahead, "resume_from_checkpoint=true")
    assert code == 0, resumed
    run.is_whole()
