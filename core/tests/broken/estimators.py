"""Estimators, batch-adjust policies and a group filter that break their contract in one way each; test_testing_kit.py
says which contract tests must notice."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from attrs import evolve

from turnwise import Implementation, hookimpl
from turnwise.contracts.batch_adjust import AdjustInput, PlannedUpdate
from turnwise.data.batch import Batch, Table
from turnwise.data.ops import trains
from turnwise.testing.fakes import (
    FakeBatchAdjust,
    FakeEstimator,
)


class LeaksOutsideTheMask(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        return advantages, returns + 1


class CountsRows(FakeEstimator):
    """The mean over rows: a trajectory counts as often as it was cut."""

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        scores = batch.trajectories["scores"]
        mean = scores[batch.samples["trajectory"]].mean() if len(batch.samples) else 0.0
        owner, mask = batch.tokens["trajectory"], batch.tokens["response_mask"]
        values = np.where(mask, scores[owner] - mean, 0.0)
        return values, values


class ReadsGroupNumbers(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        return advantages * (1 + batch.trajectories["group"][batch.tokens["trajectory"]]), returns


class ReadsWhatWasFiltered(FakeEstimator):
    """The baseline of a group counts members that a filter dropped."""

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        everything = batch.with_trajectories(trains=np.ones(len(batch.trajectories), np.bool_))
        advantages, returns = super().compute(everything)
        kept = trains(batch)[batch.tokens["trajectory"]]
        return advantages * kept, returns * kept


class TrainsWhatWasFiltered(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        dropped = batch.tokens["response_mask"] & ~trains(batch)[batch.tokens["trajectory"]]
        return advantages + dropped, returns


class MixesRoles(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return super().compute(batch.with_trajectories(traj_group_id=batch.trajectories["group"]))


class DividesByTheSpread(FakeEstimator):
    """Not finite where all scores of the batch are equal."""

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        with np.errstate(invalid="ignore", divide="ignore"):
            return advantages / np.float64(batch.trajectories["scores"].std()), returns


class WritesIntoTheBatch(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        batch.tokens["token_level_rewards"][:] = 0
        return super().compute(batch)


class SinglePrecision(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        return advantages.astype(np.float32), returns


class InventsARow(FakeBatchAdjust):
    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        made = super().plan(rows)
        return [
            *made[:-1],
            PlannedUpdate(np.append(made[-1].rows, len(rows.trajectory)), np.append(made[-1].weights, 1.0)),
        ]


class Miscounts(FakeBatchAdjust):
    def updates(self, rows: int) -> int:
        return super().updates(rows) + 1


class ShufflesGlobally(FakeBatchAdjust):
    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        return super().plan(evolve(rows, seed=random.randrange(10**9)))


class KeepsNumbers:
    def __init__(self, config: None, context: Any) -> None:
        pass

    def keep(self, trajectories: Table) -> np.ndarray:
        return np.ones(len(trajectories))


@hookimpl
def advantage_estimators() -> list[Implementation]:
    made = [LeaksOutsideTheMask, CountsRows, ReadsGroupNumbers, DividesByTheSpread, WritesIntoTheBatch, SinglePrecision]
    made += [ReadsWhatWasFiltered, TrainsWhatWasFiltered, MixesRoles]
    return [Implementation(c.__name__, c) for c in made]


@hookimpl
def batch_adjusts() -> list[Implementation]:
    return [Implementation(c.__name__, c) for c in (InventsARow, Miscounts, ShufflesGlobally)]


@hookimpl
def group_filters() -> list[Implementation]:
    return [Implementation("KeepsNumbers", KeepsNumbers)]
