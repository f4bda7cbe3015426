"""Where the log-probs of the policy that sampled come from: the sampler, the new ones detached, or a pass of the trainer."""

from __future__ import annotations

from typing import Any

import numpy as np

from turnwise.config.schema import RunConfig
from turnwise.data.batch import Batch
from turnwise.errors import ConfigError
from turnwise.pipeline.updates import training_rows


class OldLogProbs:
    """`recompute_old_logprobs: auto | true | false`.

    auto: the sampler's where they are the trainer's own (shared weights of the same dtype, every token of the current version); else the
    new ones detached, without a pass, if the step has exactly one update and nothing else reads them; else recomputed.
    """

    def __init__(self, config: RunConfig, *, shared: bool) -> None:
        self._mode = config.recompute_old_logprobs
        self._shared = shared
        self._read_by_reward = config.init_kl_coef > 0

    async def add(self, batch: Batch, actor: Any, *, updates: int, version: int) -> Batch:
        """The batch with the token column `old_log_probs` (NaN: the new ones, detached)."""
        how = self.choose(batch, updates, version)
        sampled = batch.tokens["response_mask"]
        column = np.zeros(len(batch.tokens), np.float32)
        if how == "sampler":
            column[sampled] = batch.tokens["infer_log_probs"][sampled]
        elif how == "detached":
            column[sampled] = np.nan
        elif sampled.any():
            column[sampled] = await actor.call("logprobs", training_rows(batch))
        return batch.with_tokens(old_log_probs=column)

    def choose(self, batch: Batch, updates: int, version: int) -> str:
        """`sampler`, `detached` or `recompute`. Raises ConfigError where the sampler's are asked for and there are none."""
        if self._mode == "false" and not batch.has_infer_log_probs:
            raise ConfigError(
                "recompute_old_logprobs: false needs the sampler's log-probs, and it gave none for some tokens (truncation by top_p, top_k?). "
                "Fix: recompute_old_logprobs: auto."
            )
        current = bool((batch.tokens["versions"][batch.sampled] == version).all())
        if self._mode == "false" or (self._mode == "auto" and self._shared and batch.has_infer_log_probs and current):
            return "sampler"
        if self._mode == "auto" and updates == 1 and not self._read_by_reward:
            return "detached"
        return "recompute"
