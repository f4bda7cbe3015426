"""A trajectory as plain JSON data: text, tokens, masks, log-probs and rewards in full, images as their shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from turnwise.data.trajectory import Trajectory, Turn


def plain(value: Any) -> Any:  # Any: JSON
    """`value` as JSON data: numbers that JSON lacks (NaN, infinities) become null, arrays of two or more axes their
    shape, flat arrays lists, unknown objects their repr."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        # Images alone have so many axes here, and their pixels would make a record of megabytes.
        return {"shape": list(value.shape), "dtype": str(value.dtype)} if value.ndim > 1 else plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


def turn_record(turn: Turn) -> dict[str, Any]:  # Any: JSON
    """One turn; per-token lists run over `response_ids`."""
    return {
        "text": turn.text,
        "action": turn.action,
        "observation": plain(turn.observation),
        "reward": plain(float(turn.reward)),
        "finish": turn.finish,
        "prompt_ids": turn.prompt_ids.tolist(),
        "response_ids": turn.response_ids.tolist(),
        "response_mask": turn.response_mask.astype(int).tolist(),
        "logprobs": None if turn.logprobs is None else plain(turn.logprobs),
        "versions": turn.versions.tolist(),
        "images": list(turn.images),
        "metrics": plain(turn.metrics),
    }


def trajectory_record(step: int, trajectory: Trajectory) -> dict[str, Any]:  # Any: JSON
    """One trajectory; `step` comes first, so that a reader can choose lines without parsing them."""
    return {
        "step": step,
        "tag": trajectory.tag,
        "group": int(trajectory.group),
        "member": int(trajectory.member),
        **({"role": trajectory.role} if trajectory.role else {}),
        "attempt": int(trajectory.attempt),
        "seed": int(trajectory.seed),
        "score": plain(trajectory.score),
        "stop_reason": trajectory.stop_reason,
        "success": plain(trajectory.success),
        "turns": [turn_record(turn) for turn in trajectory.turns],
        "final_observation": plain(trajectory.final_observation),
        "images": [list(image.shape) for image in trajectory.images],
        "metrics": plain(trajectory.metrics),
    }
