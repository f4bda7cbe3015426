"""What a training strategy receives: whole samples with per-response-token columns, one optimizer update, and its
result."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import field, frozen

from turnwise.data.batch import Batch


@frozen(eq=False)
class Rows:
    """S samples as flat arrays.

    `input_ids` int32 [T]; `offsets` int64 [S+1] delimits the samples; `response_mask` bool [T] marks the R sampled
    tokens (never the first of a sample); `columns`: arrays [R, …] over the sampled tokens in this order, under the
    batch's names. `images[s]`: the images (uint8 H×W×3) of sample s.
    """

    input_ids: np.ndarray
    offsets: np.ndarray
    response_mask: np.ndarray
    columns: Mapping[str, np.ndarray] = field(factory=dict)
    images: tuple[tuple[np.ndarray, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sample."""
        return np.diff(self.offsets)

    def select(self, samples: np.ndarray) -> Rows:
        """The named samples, in the named order (a sample may be named twice)."""
        samples = np.asarray(samples, np.int64)
        tokens = ranges(self.offsets[samples], self.lengths[samples])
        # Sampled tokens before each boundary between samples.
        responses = np.cumsum(np.concatenate([[0], self.response_mask]))[self.offsets]
        picked = ranges(responses[samples], np.diff(responses)[samples])
        return Rows(
            input_ids=self.input_ids[tokens],
            offsets=np.concatenate([[0], np.cumsum(self.lengths[samples])]).astype(np.int64),
            response_mask=self.response_mask[tokens],
            columns={name: column[picked] for name, column in self.columns.items()},
            images=tuple(self.images[s] for s in samples) if self.images else (),
        )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The concatenation of arange(start, start + length) over all pairs, without a loop."""
    lengths = np.asarray(lengths, np.int64)
    # What to add to a plain 0…n−1 so that each piece begins at its own start.
    shift = np.repeat(np.asarray(starts, np.int64) - (np.cumsum(lengths) - lengths), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + shift


def rows_of(batch: Batch, samples: np.ndarray | None = None, columns: tuple[str, ...] | None = None) -> Rows:
    """The batch's samples as rows (all of them by default), with the named token columns, or with all that exist."""
    names = [n for n in batch.tokens if n not in ("input_ids", "response_mask")] if columns is None else list(columns)
    mask = batch.tokens["response_mask"]
    owner = batch.samples["trajectory"]
    # Samples refer to images by index: each is kept once for its trajectory.
    images = tuple(tuple(batch.images[owner[s]][i] for i in which) for s, which in enumerate(batch.sample_images))
    rows = Rows(
        input_ids=batch.tokens["input_ids"],
        offsets=np.concatenate([batch.samples["start"], [len(batch.tokens)]]).astype(np.int64),
        response_mask=mask,
        columns={name: batch.tokens[name][mask] for name in names},
        images=images if any(images) else (),
    )
    return rows if samples is None else rows.select(samples)


@frozen(eq=False)
class Update:
    """One optimizer update.

    The objective is Σ coef·loss over the response tokens of `rows` (plus the entropy and KL terms of the objective,
    under the same coef): `rows.columns` holds `coef` float64 (row weight × mask ÷ denominator of the aggregation over
    the whole update), `weight` float64 (row weight × mask), `advantages`, `old_log_probs` (NaN: use the new ones,
    detached) and whatever else the batch carries. Where there is a column `policy_weight` float64, the policy loss of
    each token, and it alone, is multiplied with it. `lr` is the learning rate of exactly this update; `entropy_coef`
    and `kl_coef` are this step's coefficients.
    """

    rows: Rows
    lr: float
    entropy_coef: float = 0.0
    kl_coef: float = 0.0


@frozen(eq=False)
class UpdateResult:
    """What an update reports: the objective's value, the gradient norm before clipping, and sums for per-token metrics.

    `sums[name] = (Σ w·m·x, Σ w·m)`: the pipeline adds them over the step's updates and divides once. `skipped`: the
    loss or the gradient was not finite on some rank, so that no rank made a step; `loss` and `grad_norm` are then what
    was found, and `sums` holds nothing of the tokens.
    """

    loss: float
    grad_norm: float
    sums: Mapping[str, tuple[float, float]] = field(factory=dict)
    skipped: bool = False
