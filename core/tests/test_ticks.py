"""Whole asynchronous runs on a clock of ticks: they repeat bit for bit, whenever weights come, and keep their bound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ticking import Ticked, ticked

from turnwise.contracts.inference import Request
from turnwise.contracts.train import Offer
from turnwise.data import Generation
from turnwise.pipeline import queued
from turnwise.testing.compare import same
from turnwise.testing.fakes import FakeBackend
from turnwise.testing.runs import UNTIMED
from turnwise.testing.ticks import run_in_ticks

WAYS = ["between_batches", "between_turns", "between_tokens"]


@pytest.fixture(autouse=True)
def own_folder(toy: Any) -> None:
    """`toy` goes there, and forgets afterwards which plugins were declared."""


def computed(run: Ticked) -> dict[int, dict[str, float]]:
    """Metrics without what is told of time, and of this process."""
    return {step: {k: v for k, v in line.items() if not k.startswith(UNTIMED)} for step, line in run.metrics.items()}


# ---------------------------------------------------------------- the clock


def test_time_is_that_of_the_next_timer_and_a_thread_takes_none() -> None:
    seen: list[tuple[float, str]] = []

    async def sleeper(name: str, ticks: float, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(ticks)
            seen.append((asyncio.get_running_loop().time(), name))

    async def run() -> str:
        await asyncio.gather(sleeper("slow", 1000, 2), sleeper("quick", 700, 2))
        return await asyncio.to_thread("done".upper)

    assert run_in_ticks(run()) == "DONE"
    assert seen == [(700, "quick"), (1000, "slow"), (1400, "quick"), (2000, "slow")]


def test_what_another_thread_would_raise_is_raised() -> None:
    async def run() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="'x'"):
        run_in_ticks(run())


# ---------------------------------------------------------------- repeated


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [3, 11.5])
def test_two_runs_of_equal_training_time_are_one_run(way: str, training: float) -> None:
    one, other = (ticked(out, training=training, way=way) for out in ("one", "other"))
    assert one.tokens == other.tokens
    assert one.weights == other.weights
    lines = [
        {step: {k: v for k, v in line.items() if not k.startswith("system/")} for step, line in run.metrics.items()}
        for run in (one, other)
    ]
    assert same(*lines)  # the seconds, too: they are ticks


@pytest.mark.parametrize("way", WAYS)
def test_another_training_time_moves_the_updates_and_no_more_than_that(way: str) -> None:
    runs = [ticked(f"out{training}", training=training, way=way) for training in (3, 11)]
    tokens = [run.tokens for run in runs]
    if way == "between_batches":  # which version plays a step does not depend on time
        assert tokens[0] == tokens[1]
        assert same(*map(computed, runs))
        assert runs[0].weights == runs[1].weights
    else:
        assert [[versions for _, versions in turns] for *_, turns in tokens[0]] != [
            [versions for _, versions in turns] for *_, turns in tokens[1]
        ]
        assert [place[:3] for place in tokens[0]] == [place[:3] for place in tokens[1]]


# ---------------------------------------------------------------- the bound


@settings(max_examples=30)
@given(
    training=st.floats(0.5, 60),
    ratio=st.integers(0, 3),
    groups=st.integers(1, 3),
    longest=st.integers(1, 20),
    turns=st.integers(1, 4),
    way=st.sampled_from(WAYS),
)
def test_no_token_is_older_than_the_ratio_and_every_episode_is_trained_once(
    training: float, ratio: int, groups: int, longest: int, turns: int, way: str
) -> None:
    run = ticked(
        "out",
        training=training,
        way=way,
        ratio=ratio,
        groups=groups,
        save_steps=0,
        actor_infer__generating_args__max_new_tokens=longest,
        custom_envs__Toy__env_config={"length": turns},
        custom_envs__Toy__max_steps=turns,
    )
    for step in range(4):
        versions = run.versions(step)
        assert step - ratio <= versions.min()
        assert versions.max() <= step
        if way == "between_batches":
            assert set(versions.tolist()) == {max(0, step - ratio)}
        played = [(t.group, t.member) for t in run.played[step, "train"]]
        assert played == [(step * groups + slot, member) for slot in range(groups) for member in range(2)]
        if ratio:
            assert run.metrics[step]["async/staleness/max"] == (step - versions).max()
            assert run.metrics[step]["async/discarded_tokens"] == 0
    for _, _, _, episode in run.tokens:
        for _, versions in episode:
            assert versions == sorted(versions)
            assert len(set(versions)) == 1 or way == "between_tokens"


# ---------------------------------------------------------------- killed


def recorded(checkpoint: Path) -> Iterator[tuple[tuple[int, int], int, dict[str, Any]]]:
    """((group, member), turn, what was sampled) of every turn that open episodes of a checkpoint have behind them."""
    if (checkpoint / queued.FILE).exists():
        for group in queued.read(checkpoint)["queue"]:
            for member, generations, _ in group.get("records", ()):
                yield from (((group["identity"][2], member), turn, one) for turn, one in generations)


@settings(max_examples=25)
@given(
    until=st.floats(1, 150),
    training=st.sampled_from([3, 11.5, 30]),
    ratio=st.integers(1, 2),
    way=st.sampled_from(WAYS),
    every=st.integers(1, 2),
)
def test_killed_at_any_tick_and_resumed_every_episode_is_trained_once(
    tmp_path_factory: pytest.TempPathFactory, until: float, training: float, ratio: int, way: str, every: int
) -> None:
    out = str(tmp_path_factory.mktemp("out"))
    options: dict[str, Any] = {"training": training, "ratio": ratio, "way": way, "save_steps": every, "eval_steps": 2}
    killed = ticked(out, until=until, **options)
    resumed = ticked(out, resume_from_checkpoint=True, **options)
    run = resumed.after(killed)
    assert resumed.first % every == 0
    for step in range(4):
        assert [(t.group, t.member) for t in run.played[step, "train"]] == [
            (step * 2 + slot, member) for slot in range(2) for member in range(2)
        ]
        assert step - ratio <= run.versions(step).min()
        assert run.versions(step).max() <= step
        line = run.metrics[step]
        assert (line["rollout/attempts"], line["async/discarded_tokens"]) == (4, 0)
        if way != "between_batches":
            assert line["resume/restarted"] == 0
    for place, turn, generation in recorded(Path(out) / f"checkpoints/checkpoint-{resumed.first:06d}"):
        played = next(
            t for key in run.played for t in run.played[key] if key[1] == "train" and (t.group, t.member) == place
        )
        # What was sampled before the cut is what was trained, with the versions that it had.
        for name in ("ids", "versions"):
            assert (
                getattr(played.turns[turn], name.replace("ids", "response_ids")).tolist() == generation[name].tolist()
            )
    if way == "between_batches":
        whole = ticked(str(tmp_path_factory.mktemp("whole")), **options)
        assert run.tokens == whole.tokens
        assert run.weights == whole.weights
        assert same(computed(run), computed(whole))


# ---------------------------------------------------------------- when


class Watched:
    """What the backend was asked and given, with the ticks: (first, last, request, what it answered), (tick, version)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[float, float, Request, Generation]] = []
        self.received: list[tuple[float, int]] = []
        generate, receive = FakeBackend.generate, FakeBackend.receive
        watched = self

        async def asked(backend: FakeBackend, request: Request) -> Generation:
            clock = asyncio.get_running_loop().time
            began = clock()
            answer = await generate(backend, request)
            watched.asked.append((began, clock(), request, answer))
            return answer

        async def received(backend: FakeBackend, offer: Offer) -> int:
            watched.received.append((asyncio.get_running_loop().time(), offer.version))
            return await receive(backend, offer)

        monkeypatch.setattr(FakeBackend, "generate", asked)
        monkeypatch.setattr(FakeBackend, "receive", received)

    def newest(self, tick: float) -> int:
        """The version that was received last before this tick."""
        return max(version for at, version in self.received if at < tick)

    def times(self, evaluation: bool) -> list[tuple[float, float]]:
        """From the first to the last token, of all requests of an evaluation or of the training."""
        return [(began, ended) for began, ended, request, _ in self.asked if request.order[0] == evaluation]


def test_a_tokens_version_changes_exactly_at_the_tick_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    ticked("out", training=8.5, max_steps=5)  # between two ticks: no token is sampled at the moment of an update
    mixed = 0
    for began, ended, _, answer in watched.asked:
        assert answer.ids is not None
        assert answer.versions is not None
        ticks = began + 1 + np.arange(len(answer.ids))
        assert ticks[-1] == ended
        assert answer.versions.tolist() == [watched.newest(tick) for tick in ticks]
        mixed += len(set(answer.versions.tolist())) > 1
    assert mixed > 0
    assert [version for _, version in watched.received] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ratio", [1, 2])
def test_an_evaluation_never_overlaps_with_playing(monkeypatch: pytest.MonkeyPatch, way: str, ratio: int) -> None:
    watched = Watched(monkeypatch)
    ticked("out", training=9, way=way, ratio=ratio, eval_steps=1, max_steps=5)
    evaluations, training = watched.times(True), watched.times(False)
    assert len(evaluations) >= 6 * 3
    for began, ended in evaluations:
        assert not [one for one in training if one[0] < ended and began < one[1]]
    # In between_batches nothing of the training has begun at all, in the others what was sent is answered before.
    versions = [set(answer.versions.tolist()) for *_, request, answer in watched.asked if request.order[0]]
    assert all(len(one) == 1 for one in versions)


# ---------------------------------------------------------------- how long


def test_a_step_takes_as_long_as_the_slower_of_the_two() -> None:
    for training in (5, 40):
        run = ticked("out", training=training, way="between_batches", max_steps=5)
        play = run.metrics[0]["time/rollout"]  # nothing trains beside the first batch
        for step in (1, 2, 3):
            line = run.metrics[step]
            assert line["time/step"] == max(training, line["time/rollout"] + training)
            # One of the two waits for the other, and never both.
            assert min(line["time/trainer_idle"], line["time/sampler_idle"]) == 0
            assert line["time/step"] < play + training
        assert run.metrics[4]["time/sampler_idle"] == training  # nothing is left to play


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [2, 15, 60])
def test_every_tick_is_one_of_playing_of_evaluating_or_of_idleness(
    monkeypatch: pytest.MonkeyPatch, way: str, training: float
) -> None:
    watched = Watched(monkeypatch)
    run = ticked("out", training=training, way=way, max_steps=6, eval_steps=1, eval_at_end=False)
    # Environments take no time here: the sampler works while a request of the training is on its way.
    busy, until = 0.0, 0.0
    for began, ended in sorted(watched.times(False)):
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    of = {name: sum(line[f"time/{name}"] for line in run.metrics.values()) for name in ("step", "eval", "sampler_idle")}
    assert of["eval"] > 0
    assert of["sampler_idle"] == pytest.approx(of["step"] - of["eval"] - busy)
    assert all(
        line["tps/rollout"] > 0 for line in run.metrics.values() if line["time/sampler_idle"] < line["time/step"]
    )
