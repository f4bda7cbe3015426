"""Drift: where a conversation, rendered anew by the chat template, is no longer the tokens that the model saw and
sampled."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from turnwise.contracts.chat import Chat

# Tokens of either side in a report: enough to see what differs, few enough for a line of a log.
_SHOWN = 16


@frozen
class Drift:
    """The first difference of two prompts: its position, and the text from there on, as `used` and as `rendered`
    anew."""

    at: int
    used: str
    rendered: str


def drift_of(chat: Chat, used: np.ndarray, rendered: np.ndarray) -> Drift | None:
    """How `rendered` int32 [m] differs from `used` int32 [n], the tokens that the model was given; None if they are the
    same."""
    if np.array_equal(used, rendered):
        return None
    shorter = min(len(used), len(rendered))
    differs = np.flatnonzero(used[:shorter] != rendered[:shorter])
    # One is the beginning of the other: they differ where the shorter one ends.
    at = int(differs[0]) if len(differs) else shorter
    return Drift(
        at, chat.decode(used[at : at + _SHOWN], special=True), chat.decode(rendered[at : at + _SHOWN], special=True)
    )
