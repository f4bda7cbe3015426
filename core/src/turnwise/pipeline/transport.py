"""By which transport weights go from the trainer to the backend."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.config.schema import RunConfig
from turnwise.errors import EngineError


def choose(config: RunConfig, offered: Sequence[str], taken: Sequence[str], one_process: bool) -> str:
    """The first of `taken` (best first) that the trainer offers and that works in this run. Raises EngineError.

    `shared` needs one process and one dtype. `process_group` needs devices of the backend's own: NCCL has no two ranks of a group on one GPU.
    """
    train, infer = config.actor_train, config.actor_infer
    excluded = set()
    if not one_process or train.model_args.dtype != infer.model_args.dtype:
        excluded.add("shared")
    if set(train.device_mapping) & set(infer.device_mapping):
        excluded.add("process_group")
    for transport in taken:
        if transport in offered and transport not in excluded:
            return transport
    raise EngineError(
        f"actor_train offers weights by {list(offered)}, actor_infer takes {list(taken)}: no common transport. "
        "Fix: choose a backend that can be trained; players serve `turnwise rollout` and `turnwise eval` only."
    )
