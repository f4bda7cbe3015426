"""Every seed of a rollout follows from the run's seed and from what is played, never from when it is played."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import numpy as np

REPLACEMENT = 2**32
"""The r-th replacement of the group with serial number k has the serial number k + r·REPLACEMENT."""

# Kept apart in the seeds; a changed number would give every run of the past other tasks.
_TRAIN, _EVALUATION, _WALK = 0, 1, 2


@lru_cache(maxsize=256)
def tag_digest(tag: str) -> int:
    """A number of 64 bits for the tag's name, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "little")


def environment_seed(seed: int, tag: str, group: int, *, evaluation: bool = False) -> int:
    """The seed (0 ≤ seed < 2**32) with which every member of group `group` resets. Those of an evaluation are drawn
    apart from training's.

    No more bits: `np.random.RandomState`, which many environments seed, takes 32."""
    sequence = np.random.SeedSequence([seed % 2**64, tag_digest(tag), group, _EVALUATION if evaluation else _TRAIN])
    return int(sequence.generate_state(1, np.uint32)[0])


def request_seed(environment: int, member: int, attempt: int, turn: int) -> int:
    """The seed (0 ≤ seed < 2**63) of one request, from its environment's seed and (member, attempt, turn)."""
    packed = struct.pack("<QQQQ", environment, member, attempt, turn)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def task_index(seed: int, tag: str, serial: int, num_tasks: int) -> int:
    """The row of a data set that group number `serial` of its tag plays: a seeded permutation per pass over the
    rows."""
    epoch, position = divmod(serial, num_tasks)
    return int(_permutation(seed, tag, epoch, num_tasks)[position])


@lru_cache(maxsize=16)
def _permutation(seed: int, tag: str, epoch: int, num_tasks: int) -> np.ndarray:
    sequence = np.random.SeedSequence([seed % 2**64, tag_digest(tag), epoch, _WALK])
    return np.random.default_rng(sequence).permutation(num_tasks)
