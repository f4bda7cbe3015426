"""Everything that can be known before a run starts: what is wrong in the configuration, and, apart from it, what this machine lacks."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from turnwise.config.schema import Choice, RunConfig
from turnwise.contracts.inference import GeneratingArgs
from turnwise.errors import CheckpointError, ConfigError, MachineError, PluginError, TurnwiseError
from turnwise.pipeline import assembly, checkpoint
from turnwise.plugins import registry


@frozen
class Findings:
    """One line each: `config` is for the author of the YAML, `machine` for whoever provides the machine."""

    config: list[str]
    machine: list[str]


def preflight(config: RunConfig, base: Path) -> Findings:
    """Look at everything a training run will need, without starting anything."""
    wrong: list[str] = []
    lacks: list[str] = []
    config = assembly.with_seed_files(config, base)
    for role, choice in _roles(config):
        kind = "inference_backend" if role == "actor_infer" else "train_strategy"
        lacks += _devices(role, assembly.role_of(config, role).device_mapping)
        for line, machine in _role_problems(config, role, kind, choice):
            (lacks if machine else wrong).append(line)
    lacks += [f"{kind} {name!r} needs {missing}, not installed" for kind, name, missing in _missing_packages(config)]
    wrong += _environment_problems(config, base)
    if not wrong:
        wrong += _source_problems(config, base)
    lacks += _folder_problems(config)
    try:
        checkpoint.to_resume(config.resume_from_checkpoint, assembly.Folders.of(config).checkpoints)
    except CheckpointError as error:
        wrong.append(str(error))
    return Findings(list(dict.fromkeys(wrong)), list(dict.fromkeys(lacks)))


def refuse(findings: Findings) -> None:
    """Raise ConfigError or MachineError with every finding; nothing was started."""
    if findings.config:
        raise ConfigError(findings.config)
    if findings.machine:
        raise MachineError("\n".join(findings.machine))


def _roles(config: RunConfig) -> Iterator[tuple[str, Choice | None]]:
    yield "actor_train", config.actor_train.strategy_args
    yield "actor_infer", config.actor_infer.strategy_args
    if assembly.needs_reference(config):
        yield "reference", assembly.role_of(config, "reference").strategy_args
    if config.critic is not None:
        yield "critic", config.critic.strategy_args


def _role_problems(config: RunConfig, role: str, kind: str, choice: Choice | None) -> Iterator[tuple[str, bool]]:
    """(line, whether it is the machine's fault)."""
    if choice is None:
        yield f"$.{role}.strategy_args is missing. Fix: name a strategy, as in strategy_args: {{strategy_name: torch}}.", False
        return
    try:
        entry = registry().find(kind, choice.name)
        if entry.missing:
            return
        target = entry.target()
    except PluginError as error:
        yield str(error), False
        return
    if kind == "inference_backend" and getattr(target, "input", "ids") == "messages":
        yield (
            f"$.actor_infer: {choice.name!r} gives no token ids, so nothing can be trained on its responses. "
            "Fix: train with a backend such as hf; players serve `turnwise rollout` and `turnwise eval`.",
            False,
        )
    ask = getattr(target, "check", None)
    if ask is not None:
        plan = assembly.role_plan(config, role, Path(), None)
        for line in ask(plan.config, plan.context):
            yield line.removeprefix("machine: "), line.startswith("machine: ")


def _devices(role: str, mapping: tuple[int, ...]) -> list[str]:
    found = visible_gpus()
    if mapping and max(mapping) >= found:
        return [f"{role}: device_mapping needs {max(mapping) + 1} GPU{'s' if max(mapping) else ''}, found {found}"]
    return []


def visible_gpus() -> int:
    """NVIDIA devices that this process may use, counted without any engine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    folder = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", p.name)) for p in folder.glob("nvidia*"))


def _missing_packages(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    for kind, choice in chosen(config):
        try:
            entry = registry().find(kind, choice.name)
        except PluginError:
            continue  # reported where it was named
        if entry.missing:
            yield kind.replace("_", " "), choice.name, ", ".join(entry.missing)


def chosen(config: RunConfig) -> Iterator[tuple[str, Choice]]:
    """Every implementation that the run names, with its kind."""
    yield from (("inference_backend" if role == "actor_infer" else "train_strategy", c) for role, c in _roles(config) if c)
    yield "advantage_estimator", config.adv_estimator
    yield "policy_loss", config.pg_variant
    yield "batch_adjust", config.batch_adjust_mode
    yield "runtime", config.runtime
    yield "model_source", config.model_source
    yield from (("group_filter", c) for c in config.group_filters)
    yield from (("logger", c) for c in config.track_with)
    yield from (("inference_backend", c) for c in config.baselines)
    for env in config.custom_envs.values():
        yield "environment", Choice(env.env_type)
        yield "env_manager", env.env_manager


def _environment_problems(config: RunConfig, base: Path) -> list[str]:
    """Build one environment and the manager of every tag that is played."""
    problems = []
    for manager in (config.train_env_manager, config.val_env_manager):
        if manager is None:
            continue
        try:
            assembly.tag_plans(config, manager, GeneratingArgs(), base)
        except TurnwiseError as error:
            problems += str(error).split("\n")
        except (ValueError, TypeError) as error:
            problems.append(f"custom_envs: {error}")
    return problems


def _source_problems(config: RunConfig, base: Path) -> list[str]:
    try:
        return assembly.model_source(config, base).check(config.pretrain)
    except TurnwiseError as error:
        return str(error).split("\n")


def _folder_problems(config: RunConfig) -> list[str]:
    folders = assembly.Folders.of(config)
    named = {
        "output_dir": folders.output,
        "logging_dir": folders.logs,
        "render_save_dir": folders.frames,
        "rollout_dump_dir": Path(config.rollout_dump_dir) if config.rollout_dump_dir else None,
    }
    return [line for key, folder in named.items() if folder is not None and (line := _unwritable(key, folder))]


def _unwritable(key: str, folder: Path) -> str:
    """Why nothing can be written into `folder`, or the empty string. The folder itself is not made: its nearest parent is tried."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        return f"{key}: {parent} is not a folder. Fix: choose another {key}"
    try:
        with tempfile.TemporaryFile(dir=parent):
            return ""
    except OSError as error:
        return f"{key}: {folder} cannot be written ({error.strerror}). Fix: choose another {key}"
