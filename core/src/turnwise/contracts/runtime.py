"""Runtimes: where roles live. The pipeline awaits handles and has one code path for every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from attrs import field, frozen


@frozen
class RuntimeContext:
    """`timeout`: seconds that a call to a role may take before the run ends with its name. `plugins` and `base` (the folder of the YAML):
    what every further process declares before it builds anything by name."""

    timeout: float = 3600.0
    seed: int = 0
    plugins: tuple[str, ...] = ()
    base: str = "."


@frozen
class RolePlan:
    """One role to place: its name (`actor_train`, `actor_infer`, `reference`, `critic`), the kind and name of its implementation, its
    structured config and context, its devices, and the environment variables of its processes (`system_envs`), set before it is built.
    Every process builds it by name."""

    role: str
    kind: Literal["inference_backend", "train_strategy"]
    implementation: str
    config: Any
    context: Any
    devices: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)


class Handle(Protocol):
    """A placed training strategy: every public method of the implementation, awaitable.

    Optional `async watch() -> None`, awaited while the pipeline waits for something else: it ends only with the error that a process of the
    role is gone."""

    transports: tuple[str, ...]
    """The strategy's weight transports."""

    async def call(self, method: str, *args: Any) -> Any:
        """Run `method` on the role and return its result; its exception is raised here."""
        ...

    async def close(self) -> None:
        """Close the role; may be called twice."""
        ...


class Runtime(Protocol):
    """Built as `Runtime(config, context)`.

    Optional on its config class, which is asked where the runtime itself is not installed, too: `counts_devices: bool`, False where the GPUs
    of this machine say nothing of those that `device_mapping` names, and `least_devices: int`, GPUs of this machine that a role without
    `device_mapping` gets (without it none are looked for).
    Optional `stage(plans, settings, chat, backend) -> Stage | None`: workers in which episodes are played (turnwise.rollout.stage); without
    it, or with None, they are played on the driver's event loop.
    """

    one_process: bool
    """Whether all roles live in the driver's process (then the weight transport `shared` works)."""

    async def place(self, plan: RolePlan) -> Any:
        """Build the role: a Handle for training strategies; for inference backends, an InferenceBackend."""
        ...

    async def close(self) -> None:
        """Close every placed role."""
        ...
