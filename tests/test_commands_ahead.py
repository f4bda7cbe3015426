"""What a run does beside training, with batches played ahead: frames, dumps, training on written rollouts, Ctrl-C before
anything is trained, and a run that is shorter than its ratio."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.testing.fakes import FakeEnvironment

BETWEEN_BATCHES, BETWEEN_TURNS, BETWEEN_TOKENS = (
    ["async_generation_ratio=2"],
    ["async_generation_ratio=1", "weight_update=between_turns", "custom_envs.Count.step=thread"],
    ["async_generation_ratio=1", "weight_update=between_tokens", "custom_envs.Count.step=thread"],
)
WAYS = pytest.mark.parametrize("way", [BETWEEN_BATCHES, BETWEEN_TURNS, BETWEEN_TOKENS])


@pytest.fixture(scope="module")
def ahead(make_fake: Any) -> Any:
    """Two batches ahead, uninterrupted."""
    run = make_fake()
    run.train(*BETWEEN_BATCHES)
    return run


def dumped(folder: Path) -> list[list[dict[str, Any]]]:
    """The trajectories of every step's file."""
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.iterdir())]


@WAYS
def test_frames_are_of_evaluated_episodes_alone(fake: Any, way: list[str]) -> None:
    fake.train(*way, "render_save_dir=frames", "render_episodes=2", "max_steps=4", "eval_steps=2")
    frames = fake.folder / "frames"
    assert sorted(p.name for p in frames.iterdir()) == ["step-000000", "step-000002", "step-000004"]
    # Two of the four evaluated, of the groups with which an evaluation begins: no training episode is among them.
    assert {tuple(sorted(p.name for p in step.iterdir())) for step in frames.iterdir()} == {
        ("Count-0-0.gif", "Count-1-0.gif")
    }


@WAYS
def test_every_step_is_dumped_with_its_own_groups_however_far_ahead_they_were_played(fake: Any, way: list[str]) -> None:
    fake.train(*way, "rollout_dump_dir=dump", "eval_steps=0")
    steps = dumped(fake.folder / "dump")
    assert [{record["step"] for record in records} for records in steps] == [{step} for step in range(6)]
    for step, records in enumerate(steps):
        members = [(record["group"], record["member"]) for record in records]
        assert sorted(members) == [(2 * step + s, m) for s in range(2) for m in range(4)]


def test_a_dump_is_trained_again_without_playing_and_gives_the_same(
    fake: Any, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "rollout_mock={enable: true, mode: MODE, dump_dir: rollouts}"
    more = [*BETWEEN_BATCHES, "eval_steps=0"]
    fake.train(*more, where.replace("MODE", "dump"), "output_dir=played")
    files = sorted(p.name for p in (fake.folder / "rollouts").iterdir())
    assert files == [f"rollouts-{step:06d}.npz" for step in range(6)]

    def forbidden(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("an environment was reset")

    monkeypatch.setattr(FakeEnvironment, "reset", forbidden)
    fake.train(*more, where.replace("MODE", "mock"), "output_dir=again")
    fake.train(*more, where.replace("MODE", "mock"), "output_dir=third")
    assert fake.metrics("again") == fake.metrics("third") == fake.metrics("played")
    # Evaluations, which were left out here, draw nothing from what trains.
    trained = [line["policy/loss"] for line in ahead.metrics() if "policy/loss" in line]
    assert [line["policy/loss"] for line in fake.metrics("again")] == trained


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        ("turnwise.testing.fake_model:FakeModelSource.prepare", 1),  # before any role is there
        ("turnwise.rollout.worker:LocalExecutor.play", 1),  # the first episode
        ("turnwise.rollout.worker:LocalExecutor.play", 12),  # what is played ahead of the first step
        ("turnwise.rollout:Scheduler.evaluate", 1),
        ("turnwise.testing.fake_model:FakeStrategy.update", 1),  # the first update
    ],
)
def test_interrupted_before_anything_is_trained_and_resumed(fake: Any, ahead: Any, place: str, nth: int) -> None:
    ended = fake.process("train", "run.yaml", *BETWEEN_BATCHES, at=(place, nth, "interrupt"))
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert fake.checkpoints()[-1] == (1 if "update" in place else 0)
    fake.train(*BETWEEN_BATCHES, "resume_from_checkpoint=true")
    fake.same(ahead)


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seed of every episode that was begun."""
    seeds: list[int] = []
    original = FakeEnvironment.reset

    def counted(self: Any, **options: Any) -> Any:
        seeds.append(options["seed"])
        return original(self, **options)

    monkeypatch.setattr(FakeEnvironment, "reset", counted)
    return seeds


@pytest.mark.parametrize("ratio", [1, 2, 5])
@WAYS
def test_nothing_is_started_past_the_last_step(fake: Any, resets: list[int], way: list[str], ratio: int) -> None:
    fake.train(*way, f"async_generation_ratio={ratio}", "max_steps=2", "eval_steps=0", "save_steps=1")
    assert len(resets) == 2 * 8
    assert len(set(resets)) == 2 * 2  # a seed for every group
    assert fake.checkpoints() == [1, 2]
    # The file of what was played and not trained: the first checkpoint has the last step's, and the last has nothing.
    holds = [(fake.folder / f"out/checkpoints/checkpoint-00000{step}/rollouts.npz").exists() for step in (1, 2)]
    assert holds == [True, False]
    ages = [line["async/staleness/max"] for line in fake.metrics()]
    assert ages[0] == 0 and ages[1] <= 1
