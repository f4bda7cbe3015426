"""From a batch with advantages to the step's optimizer updates: policy, epochs, aggregation weights, learning rates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import evolve

from turnwise.config.schema import CoefRange, Role, RunConfig
from turnwise.contracts.batch_adjust import AdjustInput, BatchAdjust, PlannedUpdate
from turnwise.data.batch import Batch
from turnwise.data.ops import segment_means, trains
from turnwise.data.rows import Rows, Update, rows_of
from turnwise.pipeline.aggregation import token_coefficients
from turnwise.planning.schedules import learning_rate, schedule_of
from turnwise.rollout.seeds import tag_digest


def derive(seed: int, purpose: str, *where: int) -> int:
    """A seed for one purpose at one place of the run (step, epoch), from the run's seed."""
    sequence = np.random.SeedSequence([seed % 2**64, tag_digest(purpose), *where])
    # 63 bits: seeds are below 2**63 everywhere.
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1


def coefficient(value: float | CoefRange, step: int, max_steps: int) -> float:
    """A constant or linearly moving coefficient at pipeline step `step`."""
    return value.at(step / max_steps) if isinstance(value, CoefRange) else value


def plan_step(batch: Batch, adjust: BatchAdjust, seed: int, step: int) -> list[PlannedUpdate]:
    """One epoch of updates over the batch's rows; rows of filtered trajectories are left out, the trajectories still
    count."""
    owner = batch.samples["trajectory"]
    rows = np.arange(len(batch.samples), dtype=np.int64)
    rows = rows[trains(batch)[owner]]
    planned = adjust.plan(
        AdjustInput(trajectory=owner[rows], trajectories=len(batch.trajectories), seed=derive(seed, "adjust", step))
    )
    return [PlannedUpdate(rows=rows[u.rows], weights=u.weights) for u in planned]


def updates(
    batch: Batch, planned: list[PlannedUpdate], config: RunConfig, role: Role, step: int, kl_coef: float
) -> Iterator[Update]:
    """The step's updates in order, each with its coefficients and its own learning rate. Epochs permute whole updates
    by seed."""
    schedule = schedule_of(role.training_args, config.max_steps)
    everything = training_rows(batch)
    # n_p of the learning rate: progress within the step counts all epochs.
    total = config.ppo_epochs * len(planned)
    for epoch in range(config.ppo_epochs):
        # The first epoch keeps the policy's order; whole updates are permuted, so each keeps its denominators.
        order = (
            np.random.default_rng(derive(config.seed, "epoch", step, epoch)).permutation(len(planned))
            if epoch
            else range(len(planned))
        )
        for position, which in enumerate(order):
            k = epoch * len(planned) + position
            yield Update(
                rows=weighted_rows(batch, everything, planned[which], config),
                lr=learning_rate(role.training_args.learning_rate, schedule, step, k, total, config.max_steps),
                entropy_coef=coefficient(config.entropy_loss_coef, step, config.max_steps),
                kl_coef=kl_coef,
            )


def training_rows(batch: Batch) -> Rows:
    """All rows with every token column; beside them the trajectory's score, group and, where there are advantages,
    their mean over it."""
    owner = batch.tokens["trajectory"]
    table = batch.trajectories
    columns = {"scores": table["scores"][owner], "group": table["group"][owner]}
    if "advantages" in batch.tokens:
        mean = segment_means(batch.tokens["advantages"][batch.sampled], owner[batch.sampled], len(table))
        columns["trajectory_advantages"] = mean[owner]
    return rows_of(batch.with_tokens(**columns))


def weighted_rows(batch: Batch, everything: Rows, planned: PlannedUpdate, config: RunConfig) -> Rows:
    """The update's rows with the columns `coef` and `weight` (float64 per sampled token).

    The denominators in `coef` count every sampled token; where the column `policy_keep` is false, `coef` is 0.
    """
    rows = everything.select(planned.rows)
    sampled = np.diff(np.concatenate([[0], np.cumsum(rows.response_mask)])[rows.offsets])
    per_row = token_coefficients(
        config.loss_agg_mode,
        config.loss_agg_unit,
        row_ids=planned.rows,
        trajectory=batch.samples["trajectory"][planned.rows],
        weights=planned.weights,
        lengths=sampled,
        scale=config.loss_scale_factor or config.sequence_length,
    )
    # Every sampled token of a row has the same.
    coef = np.repeat(per_row, sampled)
    if "policy_keep" in rows.columns:
        coef = np.where(rows.columns["policy_keep"], coef, 0.0)
    return evolve(rows, columns={**rows.columns, "coef": coef, "weight": np.repeat(planned.weights, sampled)})
