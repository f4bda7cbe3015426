"""Merging steps changes the cost, never the objective: the gradient of a real model is equal before and after, in
fp64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from turnwise.contracts.env_manager import ManagerContext
from turnwise.data.batch import Batch, build_batch
from turnwise.data.trajectory import Trajectory, Turn
from turnwise.pipeline.aggregation import MODES, token_coefficients
from turnwise_managers.config import StepwiseConfig
from turnwise_managers.stepwise import StepwiseManager


def played() -> list[Trajectory]:
    """Four trajectories of one to four turns; most prompts continue the turn before, some begin anew; responses of
    unequal length."""
    rng = np.random.default_rng(0)
    out = []
    for member in range(4):
        turns: list[Turn] = []
        for k in range(member + 1):
            before = (
                np.concatenate([turns[-1].prompt_ids, turns[-1].response_ids])
                if k and rng.random() < 0.7
                else np.zeros(0, np.int32)
            )
            prompt = np.concatenate([before, rng.integers(0, 40, 3)]).astype(np.int32)
            response = rng.integers(0, 40, int(rng.integers(1, 6))).astype(np.int32)
            n = len(response)
            turns.append(
                Turn(prompt, response, np.ones(n, np.bool_), None, np.zeros(n, np.int32), float(rng.normal()), "")
            )
        out.append(Trajectory("Tag", 0, member, 0, tuple(turns), "turns"))
    return out


class Model(nn.Module):
    """A causal transformer of one layer in fp64 throughout (the models of transformers compute norms in fp32): ids [n]
    → logits [n, 40]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position, self.head = nn.Embedding(40, 16), nn.Embedding(128, 16), nn.Linear(16, 40)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = (self.embedding(ids) + self.position(torch.arange(len(ids))))[None]
        logits: Tensor = self.head(
            self.layer(hidden, src_mask=nn.Transformer.generate_square_subsequent_mask(len(ids), dtype=torch.float64))
        )[0]
        return logits


def gradient(model: Model, batch: Batch, mode: str, unit: str) -> Tensor:
    """Of Σ coef · −A · lp over the batch's rows, each row a forward pass of its own; A differs from turn to turn."""
    owner, tokens = batch.samples["trajectory"], batch.tokens
    lengths = np.bincount(tokens["sample"][batch.sampled], minlength=len(owner))
    coef = token_coefficients(mode, unit, np.arange(len(owner)), owner, np.ones(len(owner)), lengths, scale=16.0)
    model.zero_grad()
    for row, (start, length) in enumerate(zip(batch.samples["start"], batch.samples["length"])):
        at = slice(int(start), int(start + length))
        ids = torch.from_numpy(tokens["input_ids"][at].astype(np.int64))
        log_probs = torch.log_softmax(model(ids)[:-1], -1).gather(-1, ids[1:, None])[:, 0]
        advantage = torch.from_numpy(np.where(tokens["response_mask"][at], np.sin(1.0 + tokens["turn"][at]), 0.0))
        (-coef[row] * (advantage[1:] * log_probs).sum()).backward()
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def rows(trajectories: Sequence[Trajectory], merge: bool) -> Batch:
    manager = StepwiseManager(StepwiseConfig(merge_steps=merge), ManagerContext())
    return build_batch(trajectories, [manager.samples(t) for t in trajectories])


@pytest.mark.parametrize(("mode", "unit"), [*((mode, "trajectory") for mode in MODES), ("token-mean", "sample")])
def test_the_gradient_of_a_model_is_equal_before_and_after_merging(mode: str, unit: str) -> None:
    torch.manual_seed(0)
    model = Model()
    before, after = rows(played(), False), rows(played(), True)
    assert len(after.samples) < len(before.samples) - 2
    assert len(after.samples) > 4  # one of them merged in part
    one, other = gradient(model, before, mode, unit), gradient(model, after, mode, unit)
    assert one.norm() > 1e-3
    assert float((one - other).norm() / one.norm()) <= 1e-10
