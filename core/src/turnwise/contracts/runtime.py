"""Runtimes: where roles live. The pipeline awaits typed roles and has one code path for every runtime."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from attrs import field, frozen

from turnwise.contracts.capabilities import Capabilities
from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend, InferenceContext
from turnwise.contracts.rollout import Executor, RolloutSettings, TagPlan
from turnwise.contracts.train import Offer, TrainContext, TrainStrategy
from turnwise.data.rows import Rows, Update, UpdateResult

ContextT = TypeVar("ContextT", TrainContext, InferenceContext)
T = TypeVar("T")


@frozen
class RuntimeContext:
    """`timeout`: seconds that a call to a role may take before the run ends with its name. `plugins` and `base` (the
    folder of the YAML):
    what every further process declares before it builds anything by name."""

    timeout: float = 3600.0
    seed: int = 0
    plugins: tuple[str, ...] = ()
    base: str = "."


@frozen
class RolePlan(Generic[ContextT]):
    """One role to place: its name (`actor_train`, `actor_infer`, `reference`, `critic`), the name of its
    implementation, its structured config and context, its devices, and the environment variables of its processes
    (`system_envs`), set before it is built. Every process builds it by name."""

    role: str
    implementation: str
    config: Any  # of the implementation's own config class, which the core does not know
    context: ContextT
    devices: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)


@frozen
class TrainPlan(RolePlan[TrainContext]):
    """A training role: the implementation is a `train_strategy`."""


@frozen
class ServePlan(RolePlan[InferenceContext]):
    """The sampling role: the implementation is an `inference_backend`."""


class TrainRole(Protocol):
    """A placed training strategy: every method of turnwise.contracts.train.TrainStrategy, awaitable. What the strategy
    raises is raised here; a call that does not end within `RuntimeContext.timeout` raises TrainerError with the role's
    name. Calls run one after the other."""

    async def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: log-prob of every sampled token."""
        ...

    async def base_logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: as `logprobs`, with the adapters off."""
        ...

    async def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the critic's value of the prefix before every sampled token."""
        ...

    async def update(self, update: Update) -> UpdateResult:
        """One optimizer step."""
        ...

    async def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """The current weights, ready to be read by `transport`, once by each of `receivers` engines."""
        ...

    async def send(self, offer: Offer) -> None:
        """The sending side of a transport that streams; awaited together with the backend's `receive`."""
        ...

    async def save(self, folder: Path) -> None:
        """The strategy's own state, for resume."""
        ...

    async def load(self, folder: Path) -> None:
        """Undo `save`, exactly."""
        ...

    async def export(self, folder: Path) -> None:
        """The weights in Hugging Face layout."""
        ...

    async def offload(self) -> None:
        """Give the device memory back."""
        ...

    async def onload(self) -> None:
        """Undo `offload`."""
        ...

    async def watch(self) -> None:
        """Awaited while the pipeline waits for something else: ends only with the error that a process of the role is
        gone; of a role that cannot go alone, never."""
        ...

    async def close(self) -> None:
        """Close the role; may be called twice."""
        ...


@frozen
class RuntimeCapabilities(Capabilities):
    """`one_process`: all roles live in the driver's process (only then the weight transport `shared` works). `gpus`:
    `device_mapping` numbers GPUs; False: processes without one. `counts_devices`: they are GPUs of this machine; False:
    its GPUs say nothing of them.
    `least_devices`: GPUs that a role without `device_mapping` gets; with `one_process` it is the one there is, if any.
    Which ones they are turnwise.planning.placement decides, and they come as the plan's `devices`.

    A runtime that may not be installed where a run is planned declares them on its config class."""

    kind: ClassVar[str] = "runtime"
    one_process: bool = False
    gpus: bool = True
    counts_devices: bool = True
    least_devices: int = 0


class Runtime(Protocol):
    """Built as `Runtime(config, context)`. Where its roles live it declares as RuntimeCapabilities."""

    async def train(self, plan: TrainPlan) -> TrainRole:
        """Build a training role."""
        ...

    async def serve(self, plan: ServePlan) -> InferenceBackend:
        """Build the sampling role."""
        ...

    def executor(
        self, plans: Sequence[TagPlan], settings: RolloutSettings, chat: Chat | None, backend: InferenceBackend
    ) -> Executor | None:
        """Workers in which these episodes are played; None: they are played on the driver's event loop."""
        ...

    async def close(self) -> None:
        """Close every placed role; may be called twice."""
        ...


class StrategyRole(ABC):
    """The TrainRole of a strategy in this process. A runtime says in `run` where the strategy's methods work: on a
    thread of their own, or here."""

    @abstractmethod
    async def run(self, method: str, work: Callable[[TrainStrategy], T]) -> T:
        """`work(strategy)`; `method` is its name for messages and clocks."""

    async def logprobs(self, rows: Rows) -> np.ndarray:
        """As TrainStrategy.logprobs."""
        return await self.run("logprobs", lambda strategy: strategy.logprobs(rows))

    async def base_logprobs(self, rows: Rows) -> np.ndarray:
        """As TrainStrategy.base_logprobs."""
        return await self.run("base_logprobs", lambda strategy: strategy.base_logprobs(rows))

    async def values(self, rows: Rows) -> np.ndarray:
        """As TrainStrategy.values."""
        return await self.run("values", lambda strategy: strategy.values(rows))

    async def update(self, update: Update) -> UpdateResult:
        """As TrainStrategy.update."""
        return await self.run("update", lambda strategy: strategy.update(update))

    async def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """As TrainStrategy.offer."""
        return await self.run("offer", lambda strategy: strategy.offer(transport, version, receivers))

    async def send(self, offer: Offer) -> None:
        """As TrainStrategy.send."""
        await self.run("send", lambda strategy: strategy.send(offer))

    async def save(self, folder: Path) -> None:
        """As TrainStrategy.save."""
        await self.run("save", lambda strategy: strategy.save(folder))

    async def load(self, folder: Path) -> None:
        """As TrainStrategy.load."""
        await self.run("load", lambda strategy: strategy.load(folder))

    async def export(self, folder: Path) -> None:
        """As TrainStrategy.export."""
        await self.run("export", lambda strategy: strategy.export(folder))

    async def offload(self) -> None:
        """As TrainStrategy.offload."""
        await self.run("offload", lambda strategy: strategy.offload())

    async def onload(self) -> None:
        """As TrainStrategy.onload."""
        await self.run("onload", lambda strategy: strategy.onload())

    async def watch(self) -> None:
        """Never ends: this process does not go without the driver."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """As TrainStrategy.close."""
        await self.run("close", lambda strategy: strategy.close())
