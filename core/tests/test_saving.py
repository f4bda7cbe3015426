"""What a checkpoint holds, when one is due, and what of it a run takes up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.config import load
from turnwise.config.convert import to_plain
from turnwise.errors import CheckpointError, EngineError
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.colocation import Colocation
from turnwise.pipeline.metrics import Reporting
from turnwise.pipeline.progress import Progress
from turnwise.pipeline.report import History
from turnwise.pipeline.roles import Roles
from turnwise.pipeline.rollouts import Dumped
from turnwise.pipeline.saving import Saving
from turnwise.planning import resume

Toy = Callable[..., Path]


class Role:
    """Writes a file for everything that it is asked to write."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []

    async def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "state").write_text("saved")

    async def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("exported")

    async def load(self, folder: Path) -> None:
        self.loaded.append(folder)


class Room:
    def __init__(self, toy: Toy, progress: Progress | None = None, **changes: Any) -> None:
        self.config = load(toy(**changes)).config
        self.actor, self.critic = Role(), Role()
        self.restored: list[Any] = []
        backend: Any = None
        training: Any = {"actor_train": self.actor}
        roles = Roles(
            backend, self.actor, backend, None, False, self.critic, "fake", Colocation(self.config, training, backend)
        )  # type: ignore[arg-type]
        rollouts: Any = Dumped(self.config)
        rollouts.restore = self.restored.append
        learner: Any = SimpleNamespace(kl_coef=0.25)
        self.progress, self.clock = progress or Progress(), Clock()
        self.saving = Saving(self.config, {"seed": 1}, roles, rollouts, learner, self.progress, self.clock)


def test_it_is_due_every_save_steps_but_after_the_last(toy: Toy) -> None:
    room = Room(toy, max_steps=6, save_steps=2)
    assert [done for done in range(1, 7) if room.saving.due(done)] == [2, 4]
    never = Room(toy, max_steps=6, save_steps=0)
    assert not any(never.saving.due(done) for done in range(1, 7))


def test_a_checkpoint_holds_every_role_with_a_state_the_model_and_what_the_pipeline_remembers(toy: Toy) -> None:
    progress = Progress(history=History({0: {"val/x": 1.0}}), reporting=Reporting({"Toy"}))
    room = Room(toy, progress)
    asyncio.run(room.saving.save(2))
    folder = Path("out/checkpoints/checkpoint-000002")
    assert (progress.saved, progress.saved_step) == (folder, 2)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"actor_train/state", "critic/state", "model/weights", "manifest.json"}
    state = json.loads((folder / "manifest.json").read_text())["state"]
    assert state == {
        "kl_coef": 0.25,
        "scheduler": {"queue": []},
        "history": progress.history.to_plain(),
        "reporting": ["Toy"],
        "config": {"seed": 1},
    }
    assert room.clock.take().keys() == {"save"}


def test_what_is_saved_already_is_not_written_again(toy: Toy) -> None:
    room = Room(toy, Progress(saved=Path("elsewhere"), saved_step=2))
    asyncio.run(room.saving.save(2))
    assert room.progress.saved == Path("elsewhere")
    assert not Path("out/checkpoints").exists()


@pytest.mark.parametrize("gone", [EngineError("gone"), None])
def test_a_run_that_fails_is_saved_without_its_backend(
    toy: Toy, gone: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, slept = Room(toy), list[str]()

    async def sleep() -> None:
        slept.append("sleep")
        if gone is not None:
            raise gone
        await asyncio.sleep(3600)

    monkeypatch.setattr(Colocation, "sleep", lambda self: sleep())
    monkeypatch.setattr("turnwise.pipeline.saving.SLEEP_SECONDS", 0.05)
    asyncio.run(room.saving.rescue(2, EngineError("an outage")))
    assert slept == ["sleep"]
    assert room.progress.saved == Path("out/checkpoints/checkpoint-000002")


def test_what_could_not_be_saved_is_not_tried_again_for_the_same_failure(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, tried = Room(toy), list[Path]()

    async def full(folder: Path) -> None:
        tried.append(folder)
        raise OSError(28, "No space left on device")

    room.actor.save = full  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="No space left") as failure:
        asyncio.run(room.saving.save(2))
    asyncio.run(room.saving.rescue(2, failure.value))
    assert len(tried) == 1


def test_what_was_saved_is_taken_up(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    first = Room(toy, Progress(history=History({0: {"val/x": 1.0}}), reporting=Reporting({"Toy"})))
    asyncio.run(first.saving.save(2))
    start = resume.read(Path("out/checkpoints/checkpoint-000002"))
    again = Room(toy)
    again.progress.take_up(start, max_steps=3)
    assert (again.progress.saved, again.progress.saved_step) == (start.folder, 2)
    assert again.progress.history == first.progress.history
    assert again.progress.reporting == Reporting({"Toy"})
    assert asyncio.run(again.saving.restore(start)) == 2
    assert again.actor.loaded == [start.folder / "actor_train"]
    assert again.critic.loaded == [start.folder / "critic"]
    assert again.restored == [{"queue": []}]


SCHEDULED = {
    "strategy_args": {"strategy_name": "fake"},
    "training_args": {"learning_rate": 1.0e-3, "lr_scheduler_type": "linear"},
}


@pytest.mark.parametrize(
    ("args", "more", "warned"),
    [
        ({}, 6, ["the learning rate of actor_train at step 3 is 0.0005, and was 0 there (lr_scheduler_type linear)"]),
        ({}, 3, []),
        ({"lr_scheduler_type": "constant"}, 6, []),
        # The share of the whole that is warm-up grows with it, too.
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.9}, 6, ["is 0.0005, and was 0.001 there"]),
    ],
)
def test_a_run_that_is_made_longer_tells_to_what_its_learning_rate_jumps(
    toy: Toy, caplog: pytest.LogCaptureFixture, args: dict[str, Any], more: int, warned: list[str]
) -> None:
    role = {**SCHEDULED, "training_args": {**SCHEDULED["training_args"], **args}}
    before = to_plain(load(toy(actor_train=role)).config)
    asyncio.run(Room(toy).saving.save(3))
    found = resume.read(Path("out/checkpoints/checkpoint-000003"))
    start = resume.Checkpoint(found.folder, 3, {**found.state, "config": before})
    asyncio.run(Room(toy, actor_train=role, max_steps=more).saving.restore(start))
    lines = [line.getMessage() for line in caplog.records if "max_steps" in line.getMessage()]
    assert len(lines) == len(warned), lines
    for line, words in zip(lines, warned, strict=True):
        assert line.startswith(
            "resumed with another setting: $.max_steps was 3, is 6: the learning rate of actor_train"
        )
        assert words in line


def test_a_new_run_moves_older_checkpoints_aside(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(Room(toy).saving.save(2))
    assert asyncio.run(Room(toy).saving.restore(None)) == 0
    assert "checkpoints that an earlier run left in out/checkpoints were moved to out/checkpoints-old-1" in caplog.text


def test_a_checkpoint_after_more_steps_than_the_run_has_is_refused(toy: Toy) -> None:
    start = resume.Checkpoint(Path("checkpoint-000004"), 4, {})
    with pytest.raises(CheckpointError, match=r"is after step 4, max_steps is 3\. Fix: raise max_steps"):
        Progress().take_up(start, max_steps=3)


def test_a_checkpoint_of_an_earlier_version_knows_no_tags_that_report(toy: Toy) -> None:
    progress = Progress()
    state = {"history": History().to_plain(), "kl_coef": 0.0, "scheduler": {"queue": []}}
    progress.take_up(resume.Checkpoint(Path("checkpoint-000002"), 2, state), max_steps=3)
    assert progress.reporting == Reporting()
