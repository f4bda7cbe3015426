"""Attempts that fail: counted, played again, dropped, their groups replaced; and when a run gives up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from worlds import CALM, Backend, Manager, World, batch, fails_first, places, plan, throw

from turnwise.contracts.rollout import RolloutResult, RolloutSettings
from turnwise.data import Sample, Trajectory
from turnwise.errors import ConfigError, EnvironmentFailure, TrainerError
from turnwise.rollout.seeds import REPLACEMENT, environment_seed


@pytest.mark.parametrize(
    ("what", "fault", "cause"),
    [
        ("reset", throw, "Lake.reset raised ValueError: boom"),
        ("step", throw, "Lake.step raised ValueError: boom"),
        ("reset", lambda: (7, {}), "returned 7 (int) as the observation"),
        ("step", lambda: ("x", math.nan, False, False, {}), "the reward nan"),
        ("step", lambda: (3.5, 0.0, False, False, {}), "returned 3.5 (float) as the observation"),
        ("step", lambda: "x", "Fix: return (observation, reward, terminated, truncated, info)"),
    ],
)
@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_failed_episode_is_counted_and_played_again_with_the_same_seed(
    mode: Any, what: str, fault: Callable[[], Any], cause: str
) -> None:
    log: list[Any] = []
    result = batch([plan(log, fails_first(1, what, fault), groups=1, step=mode)])
    assert places(result) == [(0, 0), (0, 1)]
    assert sorted(t.attempt for t in result.trajectories) == [0, 1]
    assert {entry[1] for entry in log if entry[0] == "reset"} == {environment_seed(11, "Lake", 0)}
    assert sum(entry[0] == "built" for entry in log) == 3  # the failed instance is not used again
    assert (result.counts["env_failures"], result.counts["retries"], result.counts["env_timeouts"]) == (1, 1, 0)
    assert len(result.failures) == 1
    assert result.failures[0].startswith("Lake, group 0, member ")
    assert cause in result.failures[0]


def test_a_retried_episode_has_other_request_seeds() -> None:
    backend = Backend()
    batch([plan([], fails_first(1, "step", throw))], backend=backend)
    seeds = {request.order: request.seed for request in backend.requests}
    retried = next(order for order in seeds if order[3] == 1)
    assert seeds[retried] != seeds[(*retried[:3], 0, retried[4])]


@pytest.mark.parametrize("what", ["reset", "step"])
def test_a_hanging_thread_is_a_counted_timeout_and_the_episode_is_played_again(what: str) -> None:
    settings = evolve(CALM, step_timeout=0.1, reset_timeout=0.1)
    start = time.monotonic()
    result = batch([plan([], fails_first(1, what, lambda: time.sleep(1.0)), groups=1, step="thread")], settings)
    assert time.monotonic() - start < 0.9
    assert len(result.trajectories) == 2
    assert (result.counts["env_timeouts"], result.counts["env_failures"]) == (1, 1)
    assert f"Lake.{what} did not return within 0.1 s" in result.failures[0]


def test_a_member_without_attempts_left_is_dropped_and_its_group_kept_while_two_remain() -> None:
    def run(failures: int) -> RolloutResult:
        left = [failures]

        def behave(world: World, what: str) -> None:
            if what == "step" and world.seed == environment_seed(11, "Lake", 0) and left[0]:
                left[0] -= 1
                throw()

        return batch([plan([], behave, group_size=3)], evolve(CALM, max_env_retries=0, max_concurrent=1))

    kept = run(failures=1)
    assert places(kept) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (kept.counts["dropped_members"], kept.counts["replaced_groups"]) == (1, 0)
    replaced = run(failures=2)
    assert places(replaced)[3:] == [(REPLACEMENT, 0), (REPLACEMENT, 1), (REPLACEMENT, 2)]
    assert (
        replaced.counts["dropped_members"],
        replaced.counts["replaced_groups"],
        replaced.counts["discarded_episodes"],
    ) == (2, 1, 1)


def test_a_group_with_one_usable_member_is_replaced_under_its_own_serial_number() -> None:
    lost = environment_seed(11, "Lake", 1)
    result = batch(
        [plan([], lambda world, what: throw() if world.seed == lost and what == "step" else None, groups=3)],
        evolve(CALM, max_env_retries=1),
    )
    assert places(result) == [(0, 0), (0, 1), (2, 0), (2, 1), (1 + REPLACEMENT, 0), (1 + REPLACEMENT, 1)]
    assert result.trajectories[-1].seed == environment_seed(11, "Lake", 1 + REPLACEMENT)
    counts = {
        "replaced_groups": 1,
        "dropped_members": 2,
        "env_failures": 4,
        "retries": 2,
        "episodes": 6,
        "attempts": 10,
    }
    assert {name: result.counts[name] for name in counts} == counts


def test_a_run_stops_past_the_failure_rate_and_says_why() -> None:
    settings = evolve(CALM, max_env_failure_rate=0.25)
    assert (
        len(batch([plan([], fails_first(1, "step", throw))], settings).trajectories) == 4
    )  # 1 of 4 is not past a quarter
    with pytest.raises(EnvironmentFailure) as caught:
        batch([plan([], fails_first(2, "step", throw))], settings)
    text = str(caught.value)
    assert "\n" not in text
    assert "2 attempts to play an episode failed in step 0 (Lake: 2; 4 episodes planned" in text
    assert "max_env_failure_rate: 0.25" in text
    assert "Lake.step raised ValueError: boom" in text
    assert "Fix: " in text
    assert isinstance(caught.value.__cause__, EnvironmentFailure)


def test_an_environment_that_always_fails_ends_the_run_even_at_a_high_rate() -> None:
    with pytest.raises(EnvironmentFailure, match="max_env_failure_rate"):
        batch([plan([], lambda world, what: throw())])


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_a_failure_rate_that_never_stops_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="max_env_failure_rate"):
        RolloutSettings(seed=0, max_env_failure_rate=rate)


def test_an_exception_of_the_manager_is_a_failed_attempt_but_an_error_of_turnwise_is_not() -> None:
    class Clumsy(Manager):
        left = 1

        def samples(self, trajectory: Trajectory) -> list[Sample]:
            if self.left:
                self.left -= 1
                raise error
            return super().samples(trajectory)

    error: Exception = KeyError("role")
    result = batch([evolve(plan([]), manager=Clumsy())])
    assert len(result.trajectories) == 4
    assert "the environment manager raised KeyError: 'role', at " in result.failures[0]
    assert "test_rollout_failures.py:" in result.failures[0]  # where its author looks first
    error = TrainerError("no room")
    with pytest.raises(TrainerError, match="no room"):
        batch([evolve(plan([]), manager=Clumsy())])
