"""Anchor groups: which turns of a trajectory group began in the same state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence, Set
from difflib import SequenceMatcher
from typing import Any

import numpy as np

# Without float, whose NaN equals nothing.
PLAIN = frozenset({str, int, bool, bytes, type(None)})
"""Types whose values are hashable and compare as one expects, once the type stands beside them."""
# Less costs more to hash than to keep.
SMALL = 64
"""Bytes of an array that are kept as they are."""


def anchor_groups(anchors: np.ndarray, group: np.ndarray, similarity_threshold: float | None = None) -> np.ndarray:
    """int64 [K]: a label per turn; two turns have the same one if and only if their `group` and their anchor are the
    same.

    `anchors` object [K], `group` int [K], in (trajectory, turn) order. Type and shape are kept apart: 1, True and 1.0
    are three states, arrays of other shapes or dtypes are others. With a threshold, texts of a group are clustered as
    `cluster_texts` says. Raises ValueError for an anchor that cannot be hashed.
    """
    codes, keys = _factorised(anchors)
    _, where = np.unique(group, return_inverse=True)
    # One number for a pair of group and state: equal states of two groups are never merged.
    labels: np.ndarray = where.astype(np.int64) * max(1, len(keys)) + codes
    if similarity_threshold is None:
        return labels
    # Texts are compared once for each pair of group and state, however often it was visited.
    distinct, first, back = np.unique(labels, return_index=True, return_inverse=True)
    texts: dict[int, list[int]] = {}
    # In the order in which a pair is met first, which decides the greedy clusters; np.unique sorted them by label.
    for entry in np.argsort(first):
        if isinstance(anchors[first[entry]], str):
            texts.setdefault(int(where[first[entry]]), []).append(int(entry))
    for entries in texts.values():
        clusters = cluster_texts([anchors[first[entry]] for entry in entries], similarity_threshold)
        distinct[entries] = distinct[entries][clusters]
    return distinct[back]


def cluster_texts(texts: Sequence[str], threshold: float) -> list[int]:
    """For each of the distinct `texts` the index of the first text of its cluster.

    Greedy, in order: a text joins the first cluster whose first text it resembles with difflib's ratio ≥ threshold,
    else it opens one.
    """
    clusters: list[tuple[int, SequenceMatcher[str]]] = []
    out = []
    for i, text in enumerate(texts):
        for first, matcher in clusters:
            matcher.set_seq1(text)
            # the two quick ones are upper bounds of the third, which takes quadratic time
            if (
                matcher.real_quick_ratio() >= threshold
                and matcher.quick_ratio() >= threshold
                and matcher.ratio() >= threshold
            ):
                out.append(first)
                break
        else:
            # difflib prepares its second text once.
            clusters.append((i, SequenceMatcher(None, "", text)))
            out.append(i)
    return out


class _AllPlain(dict[tuple[type, ...], bool]):
    """Whether the types of a tuple's entries are all plain: few tuples of types, many tuples."""

    def __missing__(self, kinds: tuple[type, ...]) -> bool:
        self[kinds] = PLAIN.issuperset(kinds)
        return self[kinds]


def _factorised(anchors: np.ndarray) -> tuple[np.ndarray, dict[Hashable, int]]:
    """A number per anchor, equal for equal ones, and the numbers by key: the one pass in Python.

    Of a nested anchor the parts are numbered, and then the tuple of their numbers, so that keys stay flat.
    """
    seen: dict[Hashable, int] = {}
    number_of, all_plain = seen.setdefault, _AllPlain()

    def number(anchor: Any) -> int:
        """Of one anchor, or of a part of one."""
        kind = type(anchor)
        # The usual anchors first, without a call more: this runs over every turn of a step. A NaN takes the slow way,
        # for it equals nothing, not even itself.
        if kind in PLAIN or (kind is float and not math.isnan(anchor)):
            return number_of((kind, anchor), len(seen))
        if kind is tuple:
            kinds = tuple(map(type, anchor))
            # The types stand beside the values, because 1, True and 1.0 hash alike and are three states.
            if all_plain[kinds]:
                return number_of((kinds, anchor), len(seen))
        if kind is tuple or kind is list:
            return number_of((kind, *map(number, anchor)), len(seen))
        if kind is dict:
            return number_of((kind, frozenset(zip(map(number, anchor), map(number, anchor.values())))), len(seen))
        return number_of(anchor_key(anchor), len(seen))

    return np.array([number(anchor) for anchor in anchors], np.int64), seen


def anchor_key(anchor: Any) -> Hashable:
    """A hashable key: equal for two anchors if and only if type, shape and content are equal. Raises ValueError."""
    kind = type(anchor)
    if kind in PLAIN:
        return kind, anchor
    if isinstance(anchor, np.ndarray):
        content = anchor_key(anchor.tolist()) if anchor.dtype.hasobject else _content(anchor)
        # Arrays of objects have no bytes to speak of: their entries are keyed one by one.
        return kind, anchor.dtype.str, anchor.shape, content
    if isinstance(anchor, float | np.floating):
        # A NaN equals nothing, not even itself.
        return kind, "nan" if np.isnan(anchor) else anchor
    if isinstance(anchor, Mapping):
        return kind, frozenset((anchor_key(k), anchor_key(v)) for k, v in anchor.items())
    if isinstance(anchor, Set):
        return kind, frozenset(anchor_key(item) for item in anchor)
    if isinstance(anchor, list | tuple):
        return kind, tuple(anchor_key(item) for item in anchor)
    try:
        hash(anchor)
    except TypeError as error:
        raise ValueError(
            f"gigpo cannot compare states of the type {kind.__qualname__} ({anchor!r:.80}). Fix: give info['state_key']"
            " as text, numbers, an array, or a tuple of them"
        ) from error
    return kind, anchor


def _content(array: np.ndarray) -> bytes:
    """The bytes in C order, of a large array 128 bits of them: an image need not be kept twice."""
    content = array.tobytes()
    return content if len(content) <= SMALL else hashlib.blake2b(content, digest_size=16).digest()
