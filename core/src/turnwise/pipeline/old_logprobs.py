"""Where the log-probs of the policy that sampled come from: the sampler, the new ones detached, or a pass of the
trainer."""

from __future__ import annotations

import asyncio
from typing import Protocol

import numpy as np

from turnwise.config.estimators import needed_columns
from turnwise.config.schema import RunConfig
from turnwise.config.updates import loss_capabilities
from turnwise.data.batch import Batch
from turnwise.data.rows import Rows
from turnwise.errors import ConfigError
from turnwise.pipeline.updates import training_rows
from turnwise.planning.transport import COMPARES_WITH_ITSELF


class Answers(Protocol):
    """Whoever answers for the trainer."""

    async def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: log-prob of every sampled token."""
        ...


class OldLogProbs:
    """`recompute_old_logprobs: auto | true | false`.

    auto: the sampler's where they are the trainer's own (shared weights in fp32, every token of the current version);
    else the new ones detached, without a pass, if the step has exactly one update and nothing else reads them; else
    recomputed.
    """

    def __init__(self, config: RunConfig, *, shared: bool) -> None:
        self.recomputed = False
        """Whether those of the latest batch are from a pass of the trainer, so that the sampler's can be compared with them."""
        self._mode = config.recompute_old_logprobs
        # In 16 bits decoding from a cache rounds otherwise than a pass over the row, on CPUs too: those are another
        # policy's by some per cent.
        self._own = shared and config.actor_train.model_args.dtype == "fp32"
        self._correction = config.train_infer_correction is not None and config.train_infer_correction.active
        self._read_beside = config.init_kl_coef > 0 or self._correction or "old_log_probs" in needed_columns(config)
        self._sampler_needed_by = _who_needs_the_sampler(config)

    async def add(self, batch: Batch, actor: Answers, *, updates: int, version: int) -> Batch:
        """The batch with the token column `old_log_probs` (NaN: the new ones, detached)."""
        how = self.choose(batch, updates, version)
        self.recomputed = how == "recompute"
        sampled = batch.tokens["response_mask"]
        column = np.zeros(len(batch.tokens), np.float32)
        if how == "sampler":
            column[sampled] = batch.tokens["infer_log_probs"][sampled]
        elif how == "detached":
            column[sampled] = np.nan
        elif sampled.any():
            column[sampled] = await actor.logprobs(await asyncio.to_thread(training_rows, batch))
        return batch.with_tokens(old_log_probs=column)

    def choose(self, batch: Batch, updates: int, version: int) -> str:
        """`sampler`, `detached` or `recompute`. Raises ConfigError where the sampler's are needed and there are none,
        and where a correction would compare the sampler's with themselves."""
        if self._sampler_needed_by and not batch.has_infer_log_probs:
            who, fix = self._sampler_needed_by
            raise ConfigError(
                f"{who} needs the sampler's log-probs, and it gave none for some tokens (truncation by top_p, top_k?)."
                f" Fix: {fix}."
            )
        # A token of an earlier version has log-probs that are not those of the current weights.
        current = bool((batch.tokens["versions"][batch.sampled] == version).all())
        if self._mode == "false" or (self._mode == "auto" and self._own and batch.has_infer_log_probs and current):
            if self._correction:
                raise ConfigError(COMPARES_WITH_ITSELF)
            return "sampler"
        if self._mode == "auto" and updates == 1 and not self._read_beside:
            return "detached"
        return "recompute"


def _who_needs_the_sampler(config: RunConfig) -> tuple[str, str] | None:
    """The key that cannot do without the sampler's log-probs, and what to write instead."""
    if config.recompute_old_logprobs == "false":
        return "recompute_old_logprobs: false", "recompute_old_logprobs: auto"
    # Beside asynchronous training the correction is the default: tokens without a log-prob have the weight 1 there.
    ahead = config.async_generation_ratio > 0
    if config.train_infer_correction is not None and config.train_infer_correction.active and not ahead:
        return "train_infer_correction", "sample without truncation, or remove train_infer_correction"
    if loss_capabilities(config).needs_infer_log_probs:
        return f"pg_variant: {config.pg_variant.name}", "sample without truncation, or another pg_variant"
    if "infer_log_probs" in needed_columns(config):
        return f"adv_estimator: {config.adv_estimator.name}", "sample without truncation, or another adv_estimator"
    return None
