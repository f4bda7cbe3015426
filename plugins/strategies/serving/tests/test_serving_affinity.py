"""Which of several engines a trajectory's requests go to."""

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise_serving import affinity
from turnwise_serving.affinity import Affinity


def asked(*order: int) -> Request:
    return Request(0, GeneratingArgs(), 1, order=order)


def test_a_trajectory_keeps_its_engine_however_busy_that_is() -> None:
    known = Affinity()
    with ExitStack() as busy:
        first = busy.enter_context(known.of(asked(0, 0, 0, 0, 0), [0, 1]))
        for turn in range(1, 4):
            assert busy.enter_context(known.of(asked(0, 0, 0, 0, turn), [0, 1])) == first
        assert busy.enter_context(known.of(asked(0, 0, 1, 0, 0), [0, 1])) == 1 - first


def test_a_trajectory_whose_engine_is_gone_moves_and_stays_there() -> None:
    known = Affinity()
    with known.of(asked(7, 0), [0, 1]) as home:
        assert home == 0
    with known.of(asked(7, 1), [1, 2]) as home:
        assert home == 1
    with known.of(asked(7, 2), [0, 1, 2]) as home:
        assert home == 1


def test_requests_of_no_trajectory_are_spread() -> None:
    known = Affinity()
    with known.of(asked(), [0, 1]) as one, known.of(asked(), [0, 1]) as other:
        assert {one, other} == {0, 1}


def test_the_oldest_trajectory_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(affinity, "REMEMBERED", 2)
    known = Affinity()
    with known.of(asked(1, 0), [0]):
        pass
    with known.of(asked(2, 0), [1]), known.of(asked(3, 0), [1]):
        pass
    with (
        known.of(asked(2, 1), [0, 1]) as kept,
        known.of(asked(4, 0), [0]),
        known.of(asked(4, 1), [0]),
        known.of(asked(1, 1), [0, 1]) as forgotten,
    ):
        assert (kept, forgotten) == (1, 1)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 5))
def test_new_trajectories_differ_by_one_at_most(trajectories: list[int], engines: int) -> None:
    known, counts = Affinity(), [0] * engines
    with ExitStack() as busy:
        for trajectory in dict.fromkeys(trajectories):
            counts[busy.enter_context(known.of(asked(trajectory, 0), range(engines)))] += 1
        assert max(counts) - min(counts) <= 1
