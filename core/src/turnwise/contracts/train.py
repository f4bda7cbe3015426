"""Training strategies: log-probs, values, one optimizer update at a time, weights on offer, checkpoints. Blocking; the runtime's
handle makes them asynchronous."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from attrs import field, frozen

from turnwise.data.rows import Rows, Update, UpdateResult


@frozen
class Offer:
    """Weights for a backend: which version, by which transport, and where to read them (`payload`, picklable)."""

    transport: str
    version: int
    payload: dict[str, Any] = field(factory=dict)


@frozen
class LossChoice:
    """The policy loss by name with its structured options; every process builds it by name."""

    name: str
    config: Any = None


@frozen
class Objective:
    """The fixed part of what is minimised: the policy loss, the KL estimator of the loss term, the ratio's level, value clipping.

    `entropy`: whether an entropy is needed at all (a positive coefficient at any step, or for the metric)."""

    loss: LossChoice
    kl_loss_type: str = "k3"
    ratio_type: Literal["token", "segment"] = "token"
    value_clip: float | None = None
    entropy: bool = True


@frozen
class TrainContext:
    """What a strategy is built with. `trainable` False: a frozen reference without an optimizer. `temperature`: that of sampling;
    all log-probs are of log_softmax(logits / temperature). Rates come with each update; the optimizer's other settings are here.
    With `use_sequence_packing` both token budgets are given, and several samples stand in one row."""

    model: Path
    role: str
    head: Literal["lm", "value"] = "lm"
    trainable: bool = True
    seed: int = 0
    devices: tuple[int, ...] = ()
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = True
    temperature: float = 1.0
    objective: Objective | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    per_device_train_batch_size: int = 1
    infer_batch_size: int = 1
    max_tokens_per_microbatch_in_train: int | None = None
    max_tokens_per_microbatch_in_infer: int | None = None
    use_sequence_packing: bool = False


class TrainStrategy(Protocol):
    """Built as `Strategy(config, context)`: actor, critic and reference are the same kind.

    It deals rows to ranks, cuts micro-batches (never through a sample), and steps once per `update`. It knows nothing of epochs,
    schedules, aggregation or denominators: the objective is Σ coef·loss. Optional static `check(config, context) -> list[str]`: what can be
    known before anything is built, one line each; a line that begins with `machine: ` is the machine's lack, not the configuration's fault.
    """

    transports: tuple[str, ...]

    def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: log-prob of every sampled token."""
        ...

    def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the critic's value of the prefix before every sampled token."""
        ...

    def update(self, update: Update) -> UpdateResult:
        """One optimizer step. Raises TrainerError (out of memory, non-finite loss)."""
        ...

    def offer(self, transport: str, version: int) -> Offer:
        """The current weights, ready to be read by `transport`."""
        ...

    def send(self, offer: Offer) -> None:
        """The sending side of a transport that streams; runs while the backend receives."""
        ...

    def save(self, folder: Path) -> None:
        """The strategy's own state (weights, optimizer, RNG), for resume, and nothing else in `folder`."""
        ...

    def load(self, folder: Path) -> None:
        """Undo `save`, exactly. Raises CheckpointError."""
        ...

    def export(self, folder: Path) -> None:
        """The weights with config and tokenizer in Hugging Face layout."""
        ...

    def offload(self) -> None:
        """Give the device memory back (colocated roles)."""
        ...

    def onload(self) -> None:
        """Undo `offload`."""
        ...

    def close(self) -> None:
        """Release everything; may be called twice."""
        ...
