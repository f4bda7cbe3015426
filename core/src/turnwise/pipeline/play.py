"""Playing without training: evaluation of a model or a player, and episodes to look at."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from attrs import evolve

from turnwise.config.schema import Choice, EnvManagerConfig, RunConfig
from turnwise.contracts.inference import InferenceBackend
from turnwise.errors import CheckpointError, ConfigError
from turnwise.pipeline import assembly, checkpoint, metrics
from turnwise.plugins import registry
from turnwise.rollout import RolloutResult


def with_tasks(config: RunConfig, *, episodes: int | None = None, tag: str | None = None, split: str = "val", seed: int | None = None) -> RunConfig:
    """The configuration whose `val_env_manager` plays what was asked for: `split` train or val, one tag, a number of tasks, a seed."""
    manager = config.val_env_manager if split == "val" else config.train_env_manager
    if manager is None:
        raise ConfigError(
            "$.val_env_manager is missing: there is nothing to evaluate on. "
            "Fix: add it (`turnwise rollout --split train` plays the training environments)."
        )
    manager = evolve(manager, generating_args=manager.generating_args or config.actor_infer.generating_args)
    if tag is not None:
        if tag not in config.custom_envs:
            raise ConfigError(f"--tag {tag!r} is not in custom_envs. It holds: {', '.join(config.custom_envs)}.")
        manager = evolve(manager, tags=(tag,), num_groups_partition=(manager.num_env_groups,))
    if episodes is not None:
        manager = _resized(manager, episodes)
    return evolve(config, val_env_manager=manager, val_seed=config.val_seed if seed is None else seed)


def _resized(manager: EnvManagerConfig, episodes: int) -> EnvManagerConfig:
    """As many groups of one over the tags as there are episodes, dealt evenly."""
    share, rest = divmod(episodes, len(manager.tags))
    partition = tuple(share + (i < rest) for i in range(len(manager.tags)))
    kept = [(t, n) for t, n in zip(manager.tags, partition) if n]
    return evolve(manager, num_env_groups=episodes, group_size=1, tags=tuple(t for t, _ in kept), num_groups_partition=tuple(n for _, n in kept))


def for_debugging(config: RunConfig) -> RunConfig:
    """One episode on this thread, without timeouts, retries or tolerance, so that a breakpoint in the environment works."""
    assert config.val_env_manager is not None
    manager = evolve(_resized(config.val_env_manager, 1), step_timeout=math.inf, reset_timeout=math.inf, max_env_retries=0, max_env_failure_rate=0.0)
    inline = {tag: evolve(env, step="inline") for tag, env in config.custom_envs.items()}
    infer = evolve(config.actor_infer, request_timeout=math.inf)
    return evolve(config, val_env_manager=manager, custom_envs=inline, actor_infer=infer)


def patient(config: RunConfig) -> RunConfig:
    """No time limit on responses: a person answers."""
    return evolve(config, actor_infer=evolve(config.actor_infer, request_timeout=math.inf))


async def play(config: RunConfig, base: Path, *, player: Choice | None, model: str | None, render: int = 0) -> RolloutResult:
    """Play the tasks of `val_env_manager` with a player, or with the model of a checkpoint, a folder, or `pretrain`."""
    backend, chat = await _opponent(assembly.with_seed_files(config, base), base, player, model)
    try:
        scheduler = assembly.scheduler(config, base, backend, chat, evaluation=True)
        try:
            return await scheduler.evaluate(render=render)
        finally:
            await scheduler.close()
    finally:
        await backend.close()


async def _opponent(config: RunConfig, base: Path, player: Choice | None, model: str | None) -> tuple[InferenceBackend, Any]:
    opponent = player or (config.actor_infer.strategy_args if model is None else None)
    if opponent is not None and getattr(registry().find("inference_backend", opponent.name).target(), "input", "ids") == "messages":
        return assembly.player(opponent, config.val_seed), None
    if player is not None:
        config = evolve(config, actor_infer=evolve(config.actor_infer, strategy_args=player))
    source = assembly.model_source(config, base)
    folder = source.prepare(str(model_folder(model, config)) if model is not None else config.pretrain)
    chat = source.chat(folder)
    if not assembly.counts_devices(config):  # the engine is built in this process
        config = evolve(config, actor_infer=evolve(config.actor_infer, device_mapping=()))
    plan = assembly.role_plan(config, "actor_infer", folder, chat)
    os.environ.update(plan.environment)
    context = evolve(plan.context, lora=None, updates=False)  # nobody sends adapters here: they are in the exported weights
    backend: InferenceBackend = registry().build(plan.kind, plan.implementation, plan.config, context)
    return backend, chat


def model_folder(named: str, config: RunConfig) -> Path:
    """The Hugging Face folder that is meant: `latest` (the newest checkpoint of the run), a checkpoint, or a model folder."""
    if named == "latest":
        found = checkpoint.listed(assembly.Folders.of(config).checkpoints)
        if not found:
            raise CheckpointError(f"{assembly.Folders.of(config).checkpoints} holds no checkpoint. Fix: train first, or name a model folder.")
        return checkpoint.read(found[-1]).folder / "model"
    folder = Path(named)
    if not folder.is_dir():
        raise ConfigError(f"--model: {named!r} is no folder. Fix: name a checkpoint or a model folder, or 'latest'.")
    return checkpoint.read(folder).folder / "model" if (folder / checkpoint.MANIFEST).is_file() else folder


def summary(config: RunConfig, played: RolloutResult) -> dict[str, float]:
    """The evaluation metrics of what was played."""
    assert config.val_env_manager is not None
    return metrics.evaluation_metrics(played.trajectories, assembly.planned_episodes(config.val_env_manager))
