"""What holds for every advantage estimator of the repository: the rows, the groups' numbers and their sizes change
nothing, nobody is forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data import Batch
from turnwise.data.normalise import RewardNormalization
from turnwise.plugins import Registry
from turnwise.testing.synthetic import Sketch, sketched

ROOT = Path(__file__).resolve().parent.parent
OURS = {f"turnwise-{path.parent.name}" for path in ROOT.glob("plugins/estimators/*/pyproject.toml")}
KNOWN = Registry.discover()
NAMES = sorted(entry.name for entry in KNOWN.entries("advantage_estimator") if entry.distribution in OURS)
EXPECTED = {
    "grpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "step_reinforce",
    "agentic_reinforce",
    "gae",
    "gigpo",
}
ANCHORS: list[Any] = ["a", "b", 1, 1.0, True, np.zeros(2), np.zeros((1, 2)), None]


@frozen
class Played:
    """One trajectory: group, member, and per turn the reward, the number of sampled tokens and the state (an index into
    ANCHORS)."""

    group: int
    member: int
    turns: tuple[tuple[float, int, int], ...]


def build(name: str, normalization: RewardNormalization | None = None) -> Any:
    entry = KNOWN.find("advantage_estimator", name)
    config = entry.config_class()
    return entry.target()(
        config() if normalization is None else config(reward_normalization=normalization), EstimatorContext()
    )


def to_batch(played: list[Played], cut: Any = None) -> Batch:
    """The batch with the column `values`, a function of (member, turn, position) alone; a new row begins at turn k > 0
    of a trajectory where cut(trajectory, k). A trajectory that sampled nothing has no row."""
    drawn = [Sketch(one.group, [(r, n, ANCHORS[state]) for r, n, state in one.turns], one.member) for one in played]
    batch = sketched(drawn, lambda i, k: bool(cut and cut(played[i], k)))
    values = np.full(len(batch.tokens), np.nan)  # what is not sampled must not be read
    turn = batch.tokens["turn"][batch.sampled]
    first = np.concatenate([[True], turn[1:] != turn[:-1]])[: len(turn)]
    place = np.arange(len(turn)) - np.maximum.accumulate(np.where(first, np.arange(len(turn)), 0))
    member = batch.trajectories["member"][batch.tokens["trajectory"][batch.sampled]]
    values[batch.sampled] = np.sin(3.0 * member + 2.0 * batch.turns["turn"][turn] + place)
    return batch.with_tokens(values=values)


def along(estimator: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of the sampled tokens, after a check that there are no others."""
    advantages, returns = estimator.compute(batch)
    for values in (advantages, returns):
        assert values.shape == (len(batch.tokens),)
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
        assert not values[~batch.tokens["response_mask"]].any()
    return advantages[batch.sampled], returns[batch.sampled]


def by_member(estimator: Any, batch: Batch) -> dict[tuple[int, int], list[float]]:
    """Advantages of the sampled tokens by (group, member)."""
    advantages, _ = along(estimator, batch)
    owner = batch.tokens["trajectory"][batch.sampled]
    keys = zip(batch.trajectories["group"], batch.trajectories["member"])
    return {(int(g), int(m)): advantages[owner == row].tolist() for row, (g, m) in enumerate(keys)}


turn = st.tuples(st.sampled_from([0.0, 1.0, -0.5, 0.25, 0.1]), st.integers(0, 3), st.integers(0, len(ANCHORS) - 1))
members = st.lists(st.lists(turn, max_size=4).map(tuple), min_size=1, max_size=4)


@st.composite
def groups(draw: Any) -> list[Played]:
    """Groups of unequal size: failed members are missing, so that members are numbered with gaps; some have no turn,
    some no sampled token."""
    out = []
    for group, mine in enumerate(draw(st.lists(members, min_size=1, max_size=4))):
        numbers = sorted(draw(st.sets(st.integers(0, 7), min_size=len(mine), max_size=len(mine))))
        out += [Played(group, number, turns) for number, turns in zip(numbers, mine)]
    return out


normalizations = st.sampled_from(
    [None, *(RewardNormalization(g, m) for g in ("traj_group_id", "batch", "tags") for m in ("mean", "mean_std"))]
)


def test_all_estimators_are_here() -> None:
    assert set(NAMES) == EXPECTED


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(played=groups(), cuts=st.randoms(use_true_random=False), normalization=normalizations)
def test_advantages_are_the_same_whatever_the_rows(
    name: str, played: list[Played], cuts: Any, normalization: Any
) -> None:
    estimator = build(name, normalization)
    expected = along(estimator, to_batch(played))
    for cut in (lambda one, k: True, lambda one, k: cuts.random() < 0.5):
        for mine, theirs in zip(expected, along(estimator, to_batch(played, cut))):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(played=groups(), random=st.randoms(use_true_random=False), normalization=normalizations)
def test_renumbering_the_groups_permutes_the_advantages(
    name: str, played: list[Played], random: Any, normalization: Any
) -> None:
    numbers = sorted({p.group for p in played})
    shuffled = list(numbers)
    random.shuffle(shuffled)
    new = dict(zip(numbers, shuffled))
    estimator = build(name, normalization)
    before = by_member(estimator, to_batch(played))
    after = by_member(estimator, to_batch([evolve(p, group=new[p.group]) for p in played]))
    for (group, member), values in before.items():
        np.testing.assert_allclose(after[new[group], member], values, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(played=groups())
def test_a_group_s_advantages_are_its_own_business(name: str, played: list[Played]) -> None:
    """With statistics by group, what other groups did, or whether they are there, changes nothing."""
    estimator = build(name)
    together = by_member(estimator, to_batch(played))
    for group in {p.group for p in played}:
        alone = by_member(estimator, to_batch([p for p in played if p.group == group]))
        for key, values in alone.items():
            np.testing.assert_allclose(together[key], values, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(played=groups(), random=st.randoms(use_true_random=False), normalization=normalizations)
def test_what_a_filter_dropped_is_as_if_it_had_never_been(
    name: str, played: list[Played], random: Any, normalization: Any
) -> None:
    estimator = build(name, normalization)
    kept = [random.random() < 0.6 for _ in played]
    dropped = by_member(estimator, to_batch(played).with_trajectories(trains=np.array(kept, np.bool_)))
    alone = by_member(estimator, to_batch([p for p, keep in zip(played, kept) if keep]))
    for p, keep in zip(played, kept):
        mine = dropped[p.group, p.member]
        np.testing.assert_allclose(mine, alone[p.group, p.member] if keep else np.zeros(len(mine)), atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_tokens_or_without_trajectories_gives_no_advantage(name: str) -> None:
    for played in ([], [Played(0, 0, ())], [Played(0, 0, ((1.0, 0, 0),)), Played(0, 1, ())]):
        advantages, returns = build(name).compute(to_batch(played))
        assert advantages.shape == returns.shape == (0,)


SCORED = {
    "grpo": -1.0 / (7.0**0.5 + 1e-6),
    "gigpo": -1.0 / (7.0**0.5 + 1e-6),
    "rloo": -1.5,
    "reinforce_plus_plus_baseline": -1.0,
}


@pytest.mark.parametrize("name", sorted(SCORED))
def test_trajectories_of_zero_samples_count_in_their_group(name: str) -> None:
    played = [Played(0, 0, ((1.0, 2, 0),)), Played(0, 2, ((5.0, 0, 1),)), Played(0, 3, ())]  # scores 1, 5, 0
    advantages, _ = along(build(name), to_batch(played))
    np.testing.assert_allclose(advantages, [SCORED[name]] * 2, atol=1e-12)


def test_the_benchmark_prints_every_estimator() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "estimators.py"), "--turns", "100", "1000", "--repeats", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()}
    assert set(NAMES) <= set(rows)
    assert all(float(rows[name][0]) < 2.0 and rows[name][1] == "s" for name in NAMES)
