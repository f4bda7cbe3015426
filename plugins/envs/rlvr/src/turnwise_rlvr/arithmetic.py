"""Generated questions: sums, differences, the largest and the smallest of small numbers; all different, with answers of
all sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.errors import ConfigError
from turnwise_rlvr.options import integer, known_keys, texts

OPTIONS = ("count", "terms", "largest", "operations", "seed")
OPERATIONS = ("+", "-", "max", "min")
# Draws in a row that brought no new question: there are no more.
_PATIENCE = 2000


def rows(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`count` questions of `terms` (least, most) numbers: `3 + 0 - 1 =`, where no number and no sum on the way is below 0 or
    above `largest`; `max 3 7 5 =`; `min 3 7 5 =`.

    Raises ConfigError for options that cannot be used, and where there are fewer different questions."""
    known_keys("data: arithmetic", options, OPTIONS)
    count = integer("count", options.get("count", 1000), 1, 1_000_000)
    largest = integer("largest", options.get("largest", 9), 1, 10**9)
    operations = texts("operations", options.get("operations", "+"))
    if unknown := [one for one in operations if one not in OPERATIONS]:
        raise ConfigError(f"operations: {unknown[0]!r}, rlvr arithmetic. Fix: some of {', '.join(OPERATIONS)}.")
    pair = options.get("terms", (2, 4))
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ConfigError(f"terms is {pair!r}, rlvr arithmetic. Fix: least and most, as [2, 4].")
    least = integer("terms", pair[0], 2, 20)
    most = integer("terms", pair[1], least, 20)
    rng = np.random.default_rng(integer("seed", options.get("seed", 0), 0, 2**63 - 1))
    seen: set[str] = set()
    barren = 0
    while len(seen) < count:
        # The answer first: sums of numbers drawn at will would mostly be large.
        answer = int(rng.integers(largest + 1))
        question = _question(rng, answer, int(rng.integers(least, most + 1)), largest, operations)
        barren = 0 if question not in seen else barren + 1
        if barren > _PATIENCE:
            raise ConfigError(
                f"count is {count}, rlvr arithmetic, and these options give hardly more than {len(seen)} different"
                " questions. Fix: a smaller count, more terms, or a larger `largest`."
            )
        if question not in seen:
            seen.add(question)
            yield {"question": question, "answer": str(answer)}


def _question(rng: np.random.Generator, answer: int, terms: int, largest: int, operations: Sequence[str]) -> str:
    first = operations[int(rng.integers(len(operations)))]
    if first in ("max", "min"):
        low, high = (0, answer) if first == "max" else (answer, largest)
        numbers = [answer, *(int(one) for one in rng.integers(low, high + 1, terms - 1))]
        return " ".join([first, *(str(numbers[i]) for i in rng.permutation(terms)), "="])
    signs = [sign for sign in operations if sign in ("+", "-")]
    # Backwards from the answer: each step takes a number off, or adds one that is taken off later.
    words: list[str] = []
    value = answer
    for _ in range(terms - 1):
        sign = signs[int(rng.integers(len(signs)))]
        before = int(rng.integers(value + 1)) if sign == "+" else int(rng.integers(value, largest + 1))
        words[:0] = [sign, str(abs(value - before))]
        value = before
    return " ".join([str(value), *words, "="])
