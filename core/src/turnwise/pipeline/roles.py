"""What a run places: the model's folder and chat, the roles, the transport between two of them, and who shares devices
with whom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import frozen

from turnwise.config.schema import RunConfig
from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend
from turnwise.contracts.runtime import Runtime, TrainRole
from turnwise.data.rows import Rows
from turnwise.errors import PluginError, boundary
from turnwise.pipeline.colocation import Colocation
from turnwise.planning import assembly, transport

log = logging.getLogger("turnwise")


@frozen(eq=False)
class Roles:
    """The placed roles. `reference` None with `has_reference`: the actor is its own, with its adapters off.
    `transport`: how weights go from the actor to the backend."""

    chat: Chat
    actor: TrainRole
    backend: InferenceBackend
    reference: TrainRole | None
    has_reference: bool
    critic: TrainRole | None
    transport: str
    colocation: Colocation

    @property
    def with_state(self) -> dict[str, TrainRole]:
        """The roles with a state of their own, which a checkpoint holds, by name."""
        return _placed(actor_train=self.actor, critic=self.critic)

    @property
    def watched(self) -> list[TrainRole]:
        """The roles whose end the pipeline notices while it waits for something else; a backend's end is an error of
        its requests."""
        return list(_placed(actor_train=self.actor, reference=self.reference, critic=self.critic).values())

    async def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the actor's log-probs."""
        await self.colocation.bring("actor_train")
        return await self.actor.logprobs(rows)

    async def reference_logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the reference's log-probs."""
        assert self.has_reference
        if self.reference is None:
            await self.colocation.bring("actor_train")
            return await self.actor.base_logprobs(rows)
        await self.colocation.bring("reference")
        return await self.reference.logprobs(rows)

    async def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the critic's values."""
        assert self.critic is not None
        await self.colocation.bring("critic")
        return await self.critic.values(rows)


async def place(
    config: RunConfig,
    base: Path,
    runtime: Runtime,
    *,
    critic: bool,
    tokenizer: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Roles:
    """Prepare the model and place every role that the run needs. `critic`: whether the estimator asks for values;
    `tokenizer`: as in ModelSourceContext; `stopping`: whether a stop was asked for. Raises ConfigError where actor and
    backend have no transport in common, what a role raises while it is built, and Interrupted."""
    _log_given(config)
    with boundary(f"model_source {config.model_source.name!r}", PluginError):
        source = assembly.model_source(config, base, tokenizer, stopping)
        # It may download, or play episodes for a tokenizer.
        model = await asyncio.to_thread(source.prepare, config.pretrain)
        chat = source.chat(model)
    actor = await runtime.train(assembly.train_plan(config, "actor_train", model))
    backend = await runtime.serve(assembly.serve_plan(config, model, chat))
    needed, own = assembly.needs_reference(config), assembly.is_its_own_reference(config)
    chosen = transport.choose(config)
    colocation = Colocation(config, {"actor_train": actor}, backend, one_model=chosen == "shared")

    async def second(name: str) -> TrainRole:
        # A role is built on its devices.
        await colocation.make_room(name)
        role = await runtime.train(assembly.train_plan(config, name, model))
        colocation.add(name, role)
        return role

    # One after the other: on shared devices each needs the room that the one before has left.
    reference = await second("reference") if needed and not own else None
    values = await second("critic") if critic else None
    return Roles(chat, actor, backend, reference, needed, values, chosen, colocation)


def _log_given(config: RunConfig) -> None:
    """Which devices roles get that name none: whoever reads the YAML cannot see it there."""
    found = assembly.devices(config)
    for name in ("actor_train", "actor_infer"):
        numbers = ", ".join(map(str, found[name]))
        if numbers and not assembly.role_of(config, name).device_mapping:
            turns = (
                " in turns with actor_train"
                if name == "actor_infer" and set(found[name]) & set(found["actor_train"])
                else ""
            )
            log.info("%s names no device_mapping: device %s%s", name, numbers, turns)


def _placed(**roles: TrainRole | None) -> dict[str, TrainRole]:
    return {name: role for name, role in roles.items() if role is not None}
