"""What tests of training strategies share: their weights and gradients, packed rows, a planted pickle, timeouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.data.rows import Rows, Update
from turnwise_torch.strategy import TorchStrategy


def weights_of(strategy: Any) -> dict[str, torch.Tensor]:
    """Copies of all tensors that the strategy would send, by their names in checkpoints."""
    return {name: tensor.clone() for name, tensor in strategy.weights()}


def gradient_of(strategy: TorchStrategy, update: Update) -> torch.Tensor:
    """The gradient that the step of an update would use, flat; the step itself is left out, then and later."""
    seen: list[torch.Tensor] = []
    assert strategy.optimizer is not None
    optimizer = strategy.optimizer

    def step(lr: float) -> None:
        seen.append(torch.cat([m.grad.flatten() for m in optimizer.masters.values() if m.grad is not None]))

    optimizer.step = step  # type: ignore[method-assign, assignment]
    strategy.update(update)
    return seen[0]


def packed(budget: int) -> dict[str, Any]:
    """What a context says of rows that hold several samples, at most `budget` tokens each."""
    return {
        "use_sequence_packing": True,
        "max_tokens_per_microbatch_in_train": budget,
        "max_tokens_per_microbatch_in_infer": budget,
    }


def picture_rows() -> Rows:
    """One sample with an image, for a model that reads text alone."""
    mask, image = np.array([False, True]), np.zeros((1, 1, 3), np.uint8)
    return Rows(np.array([1, 2], np.int32), np.array([0, 2]), mask, images=((image,),))


class Planted:
    """Makes an empty file when it is unpickled: code that a state must not run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def collective_timeouts() -> list[float]:
    """Seconds that the collectives of each group of this process may take, for tests: torch shows them nowhere else."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in groups
        if group != torch.distributed.GroupMember.NON_GROUP_MEMBER
    ]
