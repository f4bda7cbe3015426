"""Training strategies: log-probs, values, one optimizer update at a time, weights on offer, checkpoints. Blocking; a
runtime makes them asynchronous (turnwise.contracts.runtime.TrainRole)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from attrs import field, frozen

from turnwise.contracts.capabilities import Capabilities, Options
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import Problem


@frozen
class Offer:
    """Weights for a backend: which version, by which transport, and where to read them (`payload`, picklable).

    `adapter` None: the whole model, adapters merged. Else the low-rank adapters alone, for a backend that has the model
    they were made for:
    PEFT's configuration of them (as adapter_config.json holds it), and the tensors come under the names of PEFT's
    adapter files."""

    transport: str
    version: int
    payload: dict[str, Any] = field(factory=dict)
    adapter: Mapping[str, Any] | None = None


@frozen
class Ranks:
    """The place of one process among those of its role: `rank` of `size`, `local_rank` on its host, and `address`
    ("host:port") where the processes meet. The runtime fills it in; one process needs no group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""


@frozen
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in place of full training; `target`: module names, None:
    PEFT's choice.

    `sync`: whether a backend gets them merged into the model's weights, or alone."""

    rank: int
    alpha: int
    target: tuple[str, ...] | str | None = None
    sync: Literal["merged", "adapter"] = "merged"


@frozen
class LossChoice:
    """The policy loss by name with its structured options; every process builds it by name."""

    name: str
    config: Any = None


@frozen
class Objective:
    """The fixed part of what is minimised: the policy loss, the KL estimator of the loss term, the ratio's level, value
    clipping.

    `entropy`: whether an entropy is needed at all (a positive coefficient at any step, or for the metric)."""

    loss: LossChoice
    kl_loss_type: str = "k3"
    ratio_type: Literal["token", "segment"] = "token"
    value_clip: float | None = None
    entropy: bool = True


@frozen
class TrainContext:
    """What a strategy is built with. `trainable` False: a frozen reference without an optimizer. `temperature`: that of
    sampling; all log-probs are of log_softmax(logits / temperature). Rates come with each update; the optimizer's other
    settings are here. With `use_sequence_packing` both token budgets are given, and several samples stand in one row.

    `devices`: those of this process alone, `ranks` its place among the processes of the role. `lora`: train adapters
    only; parameters whose names begin with one of `frozen` are not trained. Weights leave for the backend in buckets of
    `bucket_bytes`; every wait for the other side ends after `weight_sync_timeout` seconds, and every wait of the role's
    processes for each other after `runtime_timeout`.
    `trust_remote_code`: whether Python code in the model's folder may run."""

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
    ranks: Ranks = Ranks()
    lora: Lora | None = None
    frozen: tuple[str, ...] = ()
    bucket_bytes: int = 2**30
    weight_sync_timeout: float = 600.0
    runtime_timeout: float = 3600.0
    trust_remote_code: bool = False


@frozen
class StrategyCapabilities(Capabilities):
    """`adapters`: it offers adapters alone where `context.lora.sync` asks; then every offer but one by `shared` does.

    Arithmetic of its options for `turnwise plan`: `data_parallel_size(devices)`: how many of them see different rows
    (ValueError with the sizes that do not divide them; without it, one). `memory(facts)`: bytes on one device of
    `weights`, `gradients` and `optimizer`, and `activations` or `cpu` where it knows them; `facts` has `parameters`,
    `dtype`, `trainable`, `world`, `activations` (recomputed in the backward pass) and `activations_kept`."""

    kind: ClassVar[str] = "train_strategy"
    adapters: bool = False
    data_parallel_size: Callable[[int], int] | None = None
    memory: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None


class TrainStrategy(Protocol):
    """Built as `Strategy(config, context)`: actor, critic and reference are the same kind.

    It cuts micro-batches (never through a sample), and steps once per `update`. It knows nothing of epochs, schedules,
    aggregation or
    denominators: the objective is Σ coef·loss.

    With several processes (`context.ranks.size` > 1) each is one strategy; the runtime calls every method on all of
    them at once. Rows are dealt to the data parallel ranks by turnwise.data.dealing: each process gets its own share,
    which may be empty, and those of one data parallel rank get the same. `logprobs` and `values` answer for the rows
    given, `UpdateResult.loss` and `sums` for the rows given, `grad_norm` for all. Only rank 0 writes an offer's weights
    and an export; all take part in gathering them. `save` writes each process's own part into the one folder.

    What it can do beyond that it declares as StrategyCapabilities.
    """

    @staticmethod
    def transports(config: Options, context: TrainContext) -> tuple[str, ...]:
        """By which transports it offers weights when it is built so; asked before anything is built, too."""
        ...

    @staticmethod
    def check(config: Options, context: TrainContext) -> list[Problem]:
        """What is wrong, as far as that can be known before anything is built: `context.model` is the empty path then,
        `context.devices` all devices of the role."""
        ...

    data_parallel: tuple[int, int]
    """(rank, size) among the processes that see different rows; asked for only where a role has several processes."""

    def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: log-prob of every sampled token."""
        ...

    def base_logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: as `logprobs`, with the adapters off; asked for only with `context.lora`, where the actor is its
        own reference."""
        ...

    def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the critic's value of the prefix before every sampled token."""
        ...

    def update(self, update: Update) -> UpdateResult:
        """One optimizer step; none on any rank where the loss or the gradient is not finite on one of them, which the
        result says (`skipped`). Raises TrainerError (out of memory, a lost rank)."""
        ...

    def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """The current weights, ready to be read by `transport`, once by each of `receivers` backends."""
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
