"""The runtime `ray`: training ranks, sampling engines and environment workers as actors, placed by `device_mapping`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.contracts.chat import Chat
from turnwise.contracts.runtime import RolePlan, RuntimeContext
from turnwise.errors import TurnwiseError
from turnwise.rollout import RolloutSettings, TagPlan
from turnwise_ray.actors import Home
from turnwise_ray.backend import RayBackend
from turnwise_ray.cluster import Cluster
from turnwise_ray.config import RayConfig
from turnwise_ray.environments import RayStage, Workers
from turnwise_ray.trainer import RayHandle

SENDER = "actor_train"
"""The role whose weights the sampling role gets."""


class RayRuntime:
    """turnwise.contracts.runtime.Runtime on Ray. The cluster is started or joined when the first role is placed."""

    one_process = False

    def __init__(self, config: RayConfig, context: RuntimeContext) -> None:
        self._config, self._context = config, context
        self._home = Home(str(Path.cwd()), context.plugins, context.base)
        self._cluster = Cluster(config)
        self._workers: Workers | None = None
        self._placed: list[Any] = []

    async def place(self, plan: RolePlan) -> RayHandle | RayBackend:
        """Build the role in its processes. Raises what they raised, or MachineError (no cluster, no room)."""
        await self._cluster.start()
        timeout = self._context.timeout
        placed: RayHandle | RayBackend
        if plan.kind == "inference_backend":
            placed = await RayBackend(plan, self._cluster, self._home, timeout, self._config, self._trainer).start()
        else:
            placed = await RayHandle(plan, self._cluster, self._home, timeout, self._config.start_timeout).start()
        self._placed.append(placed)
        return placed

    def _trainer(self) -> RayHandle | None:
        """The role that sends weights, once it is placed."""
        return next((one for one in self._placed if isinstance(one, RayHandle) and one.role == SENDER), None)

    def stage(self, plans: Sequence[TagPlan], settings: RolloutSettings, chat: Chat | None, backend: Any) -> RayStage | None:
        """Workers for these episodes; None (the driver plays) without `env_workers`, for a player of the driver's, and for plans that no
        other process can build."""
        if not self._config.env_workers or not isinstance(backend, RayBackend) or any(plan.manager_builder is None for plan in plans):
            return None
        if self._workers is None:
            self._workers = Workers(self._cluster, self._home, self._config, self._context.timeout)
            backend.listen(self._workers.serve)
        return RayStage(self._workers, plans, settings, chat, backend)

    async def close(self) -> None:
        """Close every role, the latest first, then the cluster; the first error is raised when all were asked. May be called twice."""
        errors: list[Exception] = []
        if self._workers is not None:
            await self._workers.close()
        while self._placed:
            try:
                await self._placed.pop().close()
            except Exception as error:
                errors.append(error)
        with contextlib.suppress(TurnwiseError):  # of a cluster that hangs; the roles are closed
            await self._cluster.close()
        if errors:
            raise errors[0]
