"""Everything that can be known before a run starts: what is wrong in the configuration, and, apart from it, what this machine lacks."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.config.relations import rows_per_update
from turnwise.config.schema import Choice, RunConfig
from turnwise.contracts.batch_adjust import AdjustContext
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.group_filter import FilterContext
from turnwise.contracts.inference import GeneratingArgs
from turnwise.errors import CheckpointError, ConfigError, MachineError, PluginError, TurnwiseError
from turnwise.pipeline import assembly, checkpoint, mock
from turnwise.pipeline.old_logprobs import COMPARES_WITH_ITSELF
from turnwise.pipeline.updates import schedule_of
from turnwise.plugins import registry
from turnwise.rollout.process import one_line


@frozen
class Findings:
    """One line each: `config` is for the author of the YAML, `machine` for whoever provides the machine."""

    config: list[str]
    machine: list[str]


def preflight(config: RunConfig, base: Path, lacks: Sequence[str] = ()) -> Findings:
    """Look at everything a training run will need, without starting anything. `lacks`: what is known not to be here (Loaded.lacks)."""
    wrong: list[str] = []
    lacks = list(lacks)
    config = assembly.with_seed_files(config, base)
    for role, choice in _roles(config):
        kind = "inference_backend" if role == "actor_infer" else "train_strategy"
        lacks += _devices(config, role)
        wrong += _one_process(config, role)
        for line, machine in _role_problems(config, role, kind, choice):
            (lacks if machine else wrong).append(line)
        wrong += [*_undividable(config, role, wrong), *_sleepless(config, role)]
    if (config.num_gpus_per_node or 0) > (gpus := visible_gpus()):
        lacks.append(f"num_gpus_per_node: {config.num_gpus_per_node} GPUs are expected, found {gpus}. Fix: the number there is, or remove the key")
    wrong += [
        *_environment_variables(config),
        *_transport_problems(config),
        *_correction_problems(config),
        *_schedule_problems(config),
        *_other_problems(config),
    ]
    lacks += [f"{kind} {name!r} needs {missing}, not installed" for kind, name, missing in _missing_packages(config)]
    wrong += _environment_problems(config, base)
    if not wrong:
        wrong += _source_problems(config, base)
    wrong += mock.problems(config)
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


def _environment_variables(config: RunConfig) -> Iterator[str]:
    """Two values of one variable for roles that a runtime keeps in one process."""
    try:
        one_process = getattr(registry().find("runtime", config.runtime.name).target(), "one_process", False)
    except PluginError:  # told elsewhere
        return
    seen: dict[str, tuple[str, str]] = {}
    for role, _ in _roles(config) if one_process is True else ():
        for name, value in assembly.role_of(config, role).system_envs.items():
            other, before = seen.setdefault(name, (role, value))
            if before != value:
                yield (
                    f"$.{role}.system_envs.{name}: {value!r} here, {before!r} for {other}; runtime {config.runtime.name!r} has one process. "
                    "Fix: one value for both."
                )


def _transport_problems(config: RunConfig) -> list[str]:
    """Trainer and backend without a common weight transport, as far as their classes tell. A backend of messages was told already."""
    trainer = _target("train_strategy", config.actor_train.strategy_args)
    backend = _target("inference_backend", config.actor_infer.strategy_args)
    offered, taken = getattr(trainer, "transports", None), getattr(backend, "transports", None)
    if not (isinstance(offered, tuple) and isinstance(taken, tuple)) or getattr(backend, "input", "ids") == "messages":
        return []
    if assembly.adapters_alone(config) is not None:
        for side, target in (("actor_train", trainer), ("actor_infer", backend)):
            if not getattr(target, "adapters", False):
                does = "offers" if side == "actor_train" else "takes"
                return [f"$.actor_train.model_args.lora_sync: the strategy of {side} {does} whole weights only. Fix: lora_sync: merged"]
    common = set(offered) & set(taken)
    dtypes = [config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype]
    if common == {"shared"} and dtypes[0] != dtypes[1]:
        return [
            f"$.actor_infer.model_args.dtype: {dtypes[1]}, actor_train has {dtypes[0]}: the weights of this backend are shared with the trainer. "
            "Fix: the same dtype for both."
        ]
    if common:
        return []
    return [
        f"$.actor_infer: the backend takes weights by {', '.join(taken) or 'nothing'}, actor_train offers {', '.join(offered) or 'nothing'}: "
        "no common transport. Fix: choose two that share one."
    ]


def _correction_problems(config: RunConfig) -> list[str]:
    """A correction where the trainer's weights are the sampler's own, so that old log-probs would be the sampler's."""
    correction = config.train_infer_correction
    if correction is None or not correction.active or config.recompute_old_logprobs != "auto":
        return []
    offered = getattr(_target("train_strategy", config.actor_train.strategy_args), "transports", ())
    taken = getattr(_target("inference_backend", config.actor_infer.strategy_args), "transports", ())
    one_process = getattr(_target("runtime", config.runtime), "one_process", False) is True
    same = config.actor_train.model_args.dtype == config.actor_infer.model_args.dtype
    if not (isinstance(offered, tuple) and isinstance(taken, tuple) and one_process and same):
        return []
    return [COMPARES_WITH_ITSELF] if next((t for t in taken if t in offered), None) == "shared" else []


def _target(kind: str, choice: Choice | None) -> Any:
    """The class of a choice, None where it cannot be loaded (told elsewhere)."""
    try:
        return registry().find(kind, choice.name).target() if choice is not None else None
    except PluginError:
        return None


def _schedule_problems(config: RunConfig) -> list[str]:
    """What fits neither the schedule, nor the learning rate, nor the number of steps."""
    lines = []
    for name in ("actor_train", "critic"):
        role = getattr(config, name)
        if role is None:
            continue
        try:
            problems = schedule_of(role, config.max_steps).check(role.training_args.learning_rate, config.max_steps)
        except ConfigError as error:
            problems = error.problems
        lines += [f"$.{name}.training_args.{line.removeprefix('training_args.')}" for line in problems]
    return lines


NEEDED = {
    "advantage_estimator": ("needs", "token_rewards", "whiten", "compute"),
    "group_filter": ("keep",),
    "batch_adjust": ("plan", "updates"),
}
"""What the loop reads of the implementations that are built here."""


def _other_problems(config: RunConfig) -> Iterator[str]:
    """Implementations without a role: each is imported; those that are pure arithmetic are built, for they judge their settings."""
    contexts = {
        "advantage_estimator": EstimatorContext(seed=config.seed),
        "group_filter": FilterContext(seed=config.seed),
        "batch_adjust": AdjustContext(rows_per_update(config.actor_train), config.rollout_batch_size),
    }
    for kind, choice in chosen(config):
        if kind in ("inference_backend", "train_strategy") or (kind == "environment" and _absent(choice.name)):
            continue
        try:
            entry = registry().find(kind, choice.name)
            if entry.missing:
                continue
            target = entry.target()
            odd = "" if kind in ("environment", "env_manager") else _signature_problem(target, choice)
            if odd:
                yield f"{kind} {choice.name!r} (from {entry.owner}) cannot be built with (config, context): {odd}. Fix: repair the plugin."
            elif kind in contexts:
                built = assembly.build(kind, choice, contexts[kind])
                lacks = [name for name in NEEDED.get(kind, ()) if not hasattr(built, name)]
                if lacks:
                    yield f"{kind} {choice.name!r} (from {entry.owner}) lacks {', '.join(lacks)} of its contract. Fix: repair the plugin."
        except TurnwiseError as error:
            yield from str(error).split("\n")
        except Exception as error:  # a stranger's constructor may raise anything
            yield f"{kind} {choice.name!r} (from {entry.owner}) cannot be built: {one_line(error)}. Fix: repair the plugin, or its options."
    for choice in config.baselines:
        target = _target("inference_backend", choice)
        if target is not None and getattr(target, "input", "ids") != "messages":
            yield f"$.baselines: {choice.name!r} needs a model, so it is no baseline. Fix: name players, such as random."


def _signature_problem(target: Any, choice: Choice) -> str:
    """Why `target` cannot be called as plugins are, or the empty string."""
    options = choice.options if choice.config is None else {}
    try:
        inspect.signature(target).bind(choice.config, None, **options)
    except TypeError as error:
        return str(error)
    except ValueError:  # a class that tells no signature
        return ""
    return ""


def _devices(config: RunConfig, role: str) -> list[str]:
    """GPUs that this machine lacks, where it is this machine's that the runtime would give to the role."""
    mapping = assembly.role_of(config, role).device_mapping
    if not assembly.counts_devices(config):
        return []
    found = visible_gpus()
    if mapping and max(mapping) >= found:
        return [f"{role}: device_mapping needs {max(mapping) + 1} GPU{'s' if max(mapping) else ''}, found {found}"]
    least = 0 if mapping else assembly.least_devices(config)
    if least > found:
        return [f"{role}: runtime {config.runtime.name!r} gives a role without device_mapping {least} GPU{'s' if least > 1 else ''}, found {found}"]
    return []


def _undividable(config: RunConfig, role: str, told: Sequence[str]) -> list[str]:
    """Devices that hold no whole number of the engine's copies, if the engine's own check has not told it."""
    mapping, choice = assembly.role_of(config, role).device_mapping, assembly.role_of(config, role).strategy_args
    size = getattr(choice.config if choice is not None else None, "data_parallel_size", None)
    given = 0 if mapping or role != "actor_infer" else _given(config)
    if size is None or not (mapping or given):
        return []
    try:
        size(len(mapping) or given)
    except ValueError as error:
        has = f" is missing: runtime {config.runtime.name!r} gives such a role {given} GPU{'s' if given > 1 else ''}, and" if given else ":"
        return [] if any(str(error) in line for line in told) else [f"$.{role}.device_mapping{has} {error}. Fix: other sizes, or other devices"]
    return []


def _given(config: RunConfig) -> int:
    """GPUs that the runtime gives to a sampler that names none; 0: those that the engine finds, or none, as where it is attached to."""
    choice = config.actor_infer.strategy_args
    attached = getattr(choice.config if choice is not None else None, "base_url", None)
    return 0 if attached else assembly.least_devices(config)


def _sleepless(config: RunConfig, role: str) -> list[str]:
    """A training role on GPUs that the sampler does not leave when its turn is over."""
    shared = set(assembly.role_of(config, role).device_mapping) & set(config.actor_infer.device_mapping)
    ask = getattr(_target("inference_backend", config.actor_infer.strategy_args), "cannot_sleep", None)
    if role == "actor_infer" or not shared or ask is None or not assembly.counts_devices(config):
        return []
    assert config.actor_infer.strategy_args is not None
    why = ask(config.actor_infer.strategy_args.config)
    number = ", ".join(map(str, sorted(shared)))
    return [f"$.actor_infer.device_mapping: {role} uses device {number} in turns with it, and {why}"] if why else []


def _one_process(config: RunConfig, role: str) -> list[str]:
    """A training role of several devices where the runtime has one process, which drives one device."""
    mapping = assembly.role_of(config, role).device_mapping
    if role == "actor_infer" or len(mapping) < 2 or getattr(_target("runtime", config.runtime), "one_process", False) is not True:
        return []
    return [
        f"$.{role}.device_mapping: {len(mapping)} devices are as many training processes, and runtime {config.runtime.name!r} has one process: "
        "it needs runtime ray. Fix: pip install 'turnwise-ray[ray]' and runtime: ray, or one device"
    ]


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
        if manager is None or any(_absent(config.custom_envs[tag].env_type) for tag in manager.tags):
            continue
        try:
            assembly.tag_plans(config, manager, GeneratingArgs(), base)
        except TurnwiseError as error:
            problems += str(error).split("\n")
        except (ValueError, TypeError) as error:
            problems.append(f"custom_envs: {error}")
    return problems


def _absent(environment: str) -> bool:
    """Whether no installed plugin brings this environment, which loading the configuration has told."""
    return not any(entry.name == environment for entry in registry().entries("environment"))


def _source_problems(config: RunConfig, base: Path) -> list[str]:
    try:
        return assembly.model_source(config, base).check(config.pretrain)
    except TurnwiseError as error:
        return str(error).split("\n")


def _folder_problems(config: RunConfig) -> list[str]:
    folders = assembly.Folders.of(config)
    named = {
        "output_dir": folders.output,
        "logging_dir": Path(config.logging_dir) if config.logging_dir else None,
        "render_save_dir": folders.frames,
        "rollout_dump_dir": Path(config.rollout_dump_dir) if config.rollout_dump_dir else None,
        "rollout_mock.dump_dir": mock.file_of(config, 0).parent if mock.dumps(config) else None,
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
