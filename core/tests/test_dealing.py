"""Rows dealt to ranks: every sample once, loads close together, answers back in their places."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.dealing import deal, gather, merge_results
from turnwise.data.rows import Rows, UpdateResult


def rows_of_lengths(lengths: list[int], rng: np.random.Generator) -> Rows:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = rng.random(int(offsets[-1])) < 0.5
    mask[offsets[:-1][np.array(lengths, int) > 0]] = False
    return Rows(
        np.arange(offsets[-1], dtype=np.int32), offsets, mask, {"x": np.arange(int(mask.sum()), dtype=np.float64)}
    )


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 6))
def test_every_sample_goes_to_one_rank_and_loads_differ_by_at_most_the_longest_sample(
    lengths: list[int], parts: int
) -> None:
    rows = rows_of_lengths(lengths, np.random.default_rng(0))
    shares = deal(rows, parts)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 6))
def test_dealing_follows_from_the_lengths_alone(lengths: list[int], parts: int) -> None:
    rows = rows_of_lengths(lengths, np.random.default_rng(0))
    others = rows_of_lengths(lengths, np.random.default_rng(1))
    others = Rows(others.input_ids, others.offsets, others.response_mask, {"y": others.columns["x"], **others.columns})
    first = [share.tolist() for share in deal(rows, parts)]
    assert first == [share.tolist() for share in deal(others, parts)] == [share.tolist() for share in deal(rows, parts)]
    assert all(share == sorted(share) for share in first)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_gathered_answers_stand_where_their_tokens_do(lengths: list[int], parts: int, seed: int) -> None:
    rows = rows_of_lengths(lengths, np.random.default_rng(seed))
    shares = deal(rows, parts)
    answers = [rows.select(share).columns["x"] for share in shares]
    np.testing.assert_array_equal(gather(rows, shares, answers), rows.columns["x"])


def test_losses_and_sums_add_up_and_the_norm_is_that_of_all() -> None:
    merged = merge_results(
        [UpdateResult(1.0, 3.0, {"a": (1.0, 2.0)}), UpdateResult(0.5, 3.0, {"a": (4.0, 1.0), "b": (1.0, 1.0)})]
    )
    assert (merged.loss, merged.grad_norm) == (1.5, 3.0)
    assert merged.sums == {"a": (5.0, 3.0), "b": (1.0, 1.0)}


def test_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        deal(rows_of_lengths([3], np.random.default_rng(0)), 0)
