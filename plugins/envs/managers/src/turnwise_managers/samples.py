"""From turns to training rows: prompt and response tokens of a run of turns, masked to what was sampled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from turnwise.data.trajectory import Sample, Turn


def sample_of(turns: Mapping[int, Turn]) -> Sample | None:
    """One row of these turns (by their index in the trajectory), where prompt and response of each begin the prompt of the next.

    The row is the last turn's prompt and response. None if no token was sampled, or if the turns hold no prompt tokens (the backend
    took messages).
    """
    if not turns:
        return None
    last = turns[max(turns)]
    ids = np.concatenate([last.prompt_ids, last.response_ids])
    mask = np.zeros(len(ids), np.bool_)
    owner = np.full(len(ids), -1, np.int32)
    versions = np.full(len(ids), -1, np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    known = True
    for index, turn in turns.items():
        if not turn.response_mask.any():
            continue
        if not len(turn.prompt_ids):
            return None
        place = np.arange(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids))[turn.response_mask]
        mask[place] = True
        owner[place] = index
        versions[place] = turn.versions[turn.response_mask]
        if turn.logprobs is None:
            known = False
        else:
            logprobs[place] = turn.logprobs[turn.response_mask]
    if not mask.any():
        return None
    return Sample(input_ids=ids, response_mask=mask, turn=owner, logprobs=logprobs if known else None, versions=versions, images=last.images)
