"""Seeds follow from what is played, and timeouts from time in which the event loop was free."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turnwise.rollout.seeds import REPLACEMENT, environment_seed, request_seed, tag_digest, task_index
from turnwise.rollout.sweeper import Sweeper


@given(st.integers(-(2**31), 2**63), st.text(max_size=8), st.integers(0, 2**40), st.booleans())
def test_environment_seeds_fit_in_32_bits_and_repeat(seed: int, tag: str, group: int, evaluation: bool) -> None:
    value = environment_seed(seed, tag, group, evaluation=evaluation)
    assert 0 <= value < 2**32
    np.random.RandomState(value)  # takes no more
    assert value == environment_seed(seed, tag, group, evaluation=evaluation)


def test_environment_seeds_differ_by_each_of_their_sources() -> None:
    places = [
        (seed, tag, group, evaluation)
        for seed in (0, 1)
        for tag in ("a", "b")
        for group in (0, 1, REPLACEMENT)
        for evaluation in (False, True)
    ]
    seeds = {environment_seed(seed, tag, group, evaluation=evaluation) for seed, tag, group, evaluation in places}
    assert len(seeds) == len(places)


def test_request_seeds_differ_by_member_attempt_and_turn() -> None:
    seeds = {request_seed(environment_seed(0, "a", 0), m, a, t) for m in range(4) for a in range(3) for t in range(20)}
    assert len(seeds) == 4 * 3 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "from turnwise.rollout.seeds import *; print(environment_seed(7, 'Lake', 3), request_seed(5, 1, 2, 3),"
        " task_index(7, 'Lake', 12, 9))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "99"},
    )
    assert run.stdout.split() == [
        str(environment_seed(7, "Lake", 3)),
        str(request_seed(5, 1, 2, 3)),
        str(task_index(7, "Lake", 12, 9)),
    ]


def test_tag_digest_is_that_of_blake2b() -> None:
    # echo -n a | b2sum -l 64, read as little endian
    assert tag_digest("a") == int.from_bytes(bytes.fromhex("40f89e395b66422f"), "little")


def test_each_pass_over_a_data_set_is_a_permutation_of_its_own() -> None:
    passes = [[task_index(3, "a", epoch * 10 + i, 10) for i in range(10)] for epoch in range(4)]
    assert all(sorted(rows) == list(range(10)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 4
    assert [task_index(4, "a", i, 10) for i in range(10)] != passes[0]
    assert 0 <= task_index(3, "a", 5 + REPLACEMENT, 10) < 10


def test_sweeper_expires_what_is_late_and_nothing_else() -> None:
    async def scene() -> list[str]:
        expired: list[str] = []
        sweeper = Sweeper(0.1)
        sweeper.watch(0.1, lambda: expired.append("short"))
        released = sweeper.watch(0.1, lambda: expired.append("released"))
        long = sweeper.watch(60.0, lambda: expired.append("long"))
        sweeper.release(released)
        await asyncio.sleep(0.05)
        assert expired == []
        await asyncio.sleep(0.2)
        sweeper.release(long)
        sweeper.stop()
        return expired

    assert asyncio.run(scene()) == ["short"]


def test_sweeper_does_not_count_time_in_which_the_loop_was_blocked() -> None:
    async def scene() -> list[str]:
        expired: list[str] = []
        sweeper = Sweeper(0.2)
        key = sweeper.watch(0.2, lambda: expired.append("late"))
        time.sleep(0.4)
        await asyncio.sleep(0.03)
        sweeper.release(key)
        sweeper.stop()
        return expired

    assert asyncio.run(scene()) == []
