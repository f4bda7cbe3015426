"""Playing without training: evaluation of a model or a player, and episodes to look at."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from attrs import evolve

from turnwise.config.schema import Choice, EnvManagerConfig, RunConfig
from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend
from turnwise.contracts.rollout import RolloutResult
from turnwise.devices import visible_gpus
from turnwise.errors import ConfigError
from turnwise.pipeline import metrics
from turnwise.planning import assembly, builders, resume
from turnwise.plugins import registry


def with_tasks(
    config: RunConfig,
    *,
    episodes: int | None = None,
    tag: str | None = None,
    split: str = "val",
    seed: int | None = None,
) -> RunConfig:
    """The configuration whose `val_env_manager` plays what was asked for: `split` train or val, one tag, a number of
    tasks, a seed."""
    manager = config.val_env_manager if split == "val" else config.train_env_manager
    if manager is None:
        raise ConfigError(
            "$.val_env_manager is missing: there is nothing to evaluate on. "
            "Fix: add it (`turnwise rollout --split train` plays the training environments)."
        )
    manager = evolve(manager, generating_args=manager.generating_args or config.actor_infer.generating_args)
    if tag is not None:
        if tag not in config.custom_envs:
            known = ", ".join(config.custom_envs)
            raise ConfigError(f"--tag {tag!r} is not in custom_envs. It holds: {known}. Fix: one of them")
        manager = evolve(manager, tags=(tag,), num_groups_partition=(manager.num_env_groups,))
    if episodes is not None:
        manager = _resized(manager, episodes)
    return evolve(config, val_env_manager=manager, val_seed=config.val_seed if seed is None else seed)


def _resized(manager: EnvManagerConfig, episodes: int) -> EnvManagerConfig:
    """As many groups of one over the tags as there are episodes, dealt evenly."""
    share, rest = divmod(episodes, len(manager.tags))
    partition = tuple(share + (i < rest) for i in range(len(manager.tags)))
    # A tag without an episode is left out: its environment need not be there.
    kept = [(t, n) for t, n in zip(manager.tags, partition) if n]
    return evolve(
        manager,
        num_env_groups=episodes,
        group_size=1,
        tags=tuple(t for t, _ in kept),
        num_groups_partition=tuple(n for _, n in kept),
    )


def for_debugging(config: RunConfig) -> RunConfig:
    """One episode on this thread, without timeouts, retries or tolerance, so that a breakpoint in the environment
    works."""
    assert config.val_env_manager is not None
    manager = evolve(
        _resized(config.val_env_manager, 1),
        step_timeout=math.inf,
        reset_timeout=math.inf,
        max_env_retries=0,
        max_env_failure_rate=0.0,
    )
    inline = {tag: evolve(env, step="inline") for tag, env in config.custom_envs.items()}
    infer = evolve(config.actor_infer, request_timeout=math.inf)
    return evolve(config, val_env_manager=manager, custom_envs=inline, actor_infer=infer, stall_timeout=math.inf)


def patient(config: RunConfig) -> RunConfig:
    """No time limit on responses: a person answers."""
    infer = evolve(config.actor_infer, request_timeout=math.inf)
    return evolve(config, actor_infer=infer, stall_timeout=math.inf)


async def play(
    config: RunConfig, base: Path, *, player: Choice | None, model: str | None, render: int = 0
) -> RolloutResult:
    """Play the tasks of `val_env_manager` with a player, or with the model of a checkpoint, a folder, or `pretrain`."""
    with contextlib.nullcontext() if model is None else model_folder(model, config) as folder:
        backend, chat = await _opponent(assembly.with_seed_files(config, base), base, player, folder)
        try:
            scheduler = assembly.scheduler(config, base, backend, chat, evaluation=True)
            try:
                return await scheduler.evaluate(render=render)
            finally:
                await scheduler.close()
        finally:
            await backend.close()


async def _opponent(
    config: RunConfig, base: Path, player: Choice | None, model: Path | None
) -> tuple[InferenceBackend, Chat | None]:
    opponent = player or (config.actor_infer.strategy_args if model is None else None)
    if opponent is not None and registry().find("inference_backend", opponent.name).target().input == "messages":
        return builders.player(opponent, config.val_seed), None
    if player is not None:
        config = evolve(config, actor_infer=evolve(config.actor_infer, strategy_args=player))
    stopped = threading.Event()
    source = assembly.model_source(config, base, stopping=stopped.is_set)
    try:
        # On this thread Ctrl-C would be heard only when it is done: it may fetch a model, or play episodes.
        folder = await asyncio.to_thread(source.prepare, str(model) if model is not None else config.pretrain)
    except asyncio.CancelledError:
        stopped.set()
        raise
    chat = source.chat(folder)
    plan = assembly.serve_plan(config, folder, chat)
    # Here the driver is the role's process, and an engine reads its variables when it is imported or built.
    os.environ.update(plan.environment)
    context = evolve(
        plan.context, devices=_devices(config), lora=None, updates=False, sleeps=False
    )  # nobody sends adapters: they are in the exported weights
    backend: InferenceBackend = registry().build("inference_backend", plan.implementation, plan.config, context)
    return backend, chat


def _devices(config: RunConfig) -> tuple[int, ...]:
    """Those of an engine that is built in this process and has the machine for itself: the role's own, else the first
    there is."""
    capabilities = assembly.runtime_capabilities(config)
    named = config.actor_infer.device_mapping if capabilities.counts_devices else ()
    first = capabilities.gpus and not assembly.backend_capabilities(config).attached
    return named or tuple(range(min(1, visible_gpus()) if first else 0))


@contextlib.contextmanager
def model_folder(named: str, config: RunConfig) -> Iterator[Path]:
    """The Hugging Face folder that is meant: `latest` (the newest checkpoint of the run), a checkpoint, or a model
    folder.

    A run that trains meanwhile leaves a checkpoint that is held here where it is."""
    checkpoints, folder = assembly.Folders.of(config).checkpoints, None if named == "latest" else Path(named)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--model: {named!r} is no folder. Fix: name a checkpoint or a model folder, or 'latest'.")
    if folder is None or (folder / resume.MANIFEST).is_file():
        with resume.held(folder, checkpoints) as found:
            yield found.folder / "model"
    else:
        yield folder


def summary(config: RunConfig, played: RolloutResult) -> dict[str, float]:
    """The evaluation metrics of what was played."""
    assert config.val_env_manager is not None
    return metrics.evaluation_metrics(played.trajectories, assembly.planned_episodes(config.val_env_manager))
