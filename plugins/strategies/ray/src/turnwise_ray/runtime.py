"""The runtime `ray`: training ranks, sampling engines and environment workers as actors, placed by `device_mapping`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.contracts.runtime import RuntimeContext, ServePlan, TrainPlan
from turnwise.errors import TurnwiseError
from turnwise_ray.actors import Home
from turnwise_ray.backend import RayBackend
from turnwise_ray.cluster import Cluster
from turnwise_ray.config import RayConfig
from turnwise_ray.environments import Workers
from turnwise_ray.executor import HereExecutor, RayExecutor
from turnwise_ray.trainer import RayRole

SENDER = "actor_train"
"""The role whose weights the sampling role gets."""


class RayRuntime:
    """turnwise.contracts.runtime.Runtime on Ray. The cluster is started or joined when the first role is placed.

    `workers`: the environment workers, from the first executor on.
    """

    def __init__(self, config: RayConfig, context: RuntimeContext) -> None:
        self._config, self._context = config, context
        self._home = Home(str(Path.cwd()), context.plugins, context.base)
        self._cluster = Cluster(config)
        self.workers: Workers | None = None
        self._placed: list[RayRole | RayBackend] = []

    async def train(self, plan: TrainPlan) -> RayRole:
        """Build a training role in its processes. Raises what they raised, or MachineError (no cluster, no room)."""
        await self._cluster.start()
        role = await RayRole(plan, self._cluster, self._home, self._context.timeout, self._config.start_timeout).start()
        self._placed.append(role)
        return role

    async def serve(self, plan: ServePlan) -> RayBackend:
        """Build the engines of the sampling role in their processes. Raises what they raised, or MachineError (no
        cluster, no room)."""
        await self._cluster.start()
        backend = await RayBackend(
            plan, self._cluster, self._home, self._context.timeout, self._config, self._trainer
        ).start()
        self._placed.append(backend)
        return backend

    def _trainer(self) -> RayRole | None:
        """The role that sends weights, once it is placed."""
        return next((one for one in self._placed if isinstance(one, RayRole) and one.role == SENDER), None)

    def executor(
        self, plans: Sequence[TagPlan], settings: RolloutSettings, chat: Chat | None, backend: InferenceBackend
    ) -> RayExecutor | HereExecutor | None:
        """Workers for these episodes. Without `env_workers`, for a player of the driver's, and for plans that no other
        process can build, the driver plays: None, or an executor of its own where the trainer trains meanwhile."""
        if not isinstance(backend, RayBackend):
            return None
        if not self._config.env_workers or any(plan.manager_builder is None for plan in plans):
            ahead = settings.async_generation_ratio > 0 and not settings.evaluation
            return HereExecutor(plans, settings, backend, chat) if ahead else None
        if self.workers is None:
            self.workers = Workers(self._cluster, self._home, self._config, self._context.timeout)
            # Workers ask the engines themselves, and have to know which ones serve.
            backend.listen(self.workers.serve)
        return RayExecutor(self.workers, plans, settings, chat, backend)

    async def close(self) -> None:
        """Close every role, the latest first, then the cluster; the first error is raised when all were asked. May be
        called twice."""
        # The first is raised at the end: one role that fails must not keep the others from closing.
        errors: list[Exception] = []
        if self.workers is not None:
            # Workers first: their episodes ask the engines that are closed next.
            await self.workers.close()
        while self._placed:
            try:
                await self._placed.pop().close()
            except Exception as error:
                errors.append(error)
        # Of a cluster that hangs; the roles are closed.
        with contextlib.suppress(TurnwiseError):
            await self._cluster.close()
        if errors:
            raise errors[0]
