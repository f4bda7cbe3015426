"""Everything that can be known before a run starts: what is wrong in the configuration, and, apart from it, what this
machine lacks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve, frozen

from turnwise.config.schema import Choice, RunConfig
from turnwise.config.updates import rows_per_update
from turnwise.contracts.batch_adjust import AdjustContext
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.group_filter import FilterContext
from turnwise.contracts.inference import BackendCapabilities, GeneratingArgs
from turnwise.contracts.logger import ChecksBefore
from turnwise.contracts.train import StrategyCapabilities
from turnwise.declared import declared
from turnwise.errors import CheckpointError, ConfigError, MachineError, PluginError, Problem, TurnwiseError, one_line
from turnwise.planning import assembly, builders, implementations, resume, transport
from turnwise.planning.device_problems import (
    at_the_same_time,
    device_problems,
    missing_gpus,
    one_process,
    sleepless,
    undividable,
)
from turnwise.planning.schedules import schedule_of
from turnwise.plugins import registry
from turnwise.rollout import mock


@frozen
class Findings:
    """One line each: `config` is for the author of the YAML, `machine` for whoever provides the machine."""

    config: list[str]
    machine: list[str]


def preflight(config: RunConfig, base: Path, lacks: Sequence[str] = (), missing: Sequence[str] = ()) -> Findings:
    """Look at everything a training run will need, without starting anything. `lacks` and `missing`: what is known not
    to be here (Loaded)."""
    wrong: list[str] = []
    lacks = list(lacks)
    # As the run does it, or a folder beside the YAML would be looked for elsewhere.
    config = assembly.with_seed_files(config, base)
    for role, choice in _roles(config):
        kind = "inference_backend" if role == "actor_infer" else "train_strategy"
        lacks += device_problems(config, role)
        wrong += one_process(config, role)
        for problem in _role_problems(config, role, kind, choice):
            (lacks if problem.machine else wrong).append(str(problem))
        wrong += [*undividable(config, role, wrong), *sleepless(config, role), *at_the_same_time(config, role)]
    for problem in _logger_problems(config):
        (lacks if problem.machine else wrong).append(str(problem))
    lacks += missing_gpus(config)
    wrong += [
        *_environment_variables(config),
        *_transport_problems(config),
        *schedule_problems(config),
        *_other_problems(config),
    ]
    lacks += [
        f"{kind} {name!r} needs {package}, not installed. Fix: install it, or name another"
        for kind, name, package in _missing_packages(config)
    ]
    for problem in _environment_problems(config, base):
        (lacks if problem.machine else wrong).append(problem.text)
    if not wrong:
        wrong += _source_problems(config, base)
    wrong += mock.problems(config)
    lacks += _folder_problems(config)
    try:
        # Sizes alone, which takes no time: the run itself compares the contents.
        resume.to_resume(config.resume_from_checkpoint, assembly.Folders.of(config).checkpoints, contents=False)
    except CheckpointError as error:
        wrong.append(f"$.resume_from_checkpoint: {error}")
    # Roles may share a fault, which is said once.
    return Findings(list(dict.fromkeys([*missing, *wrong])), list(dict.fromkeys(lacks)))


def refuse(findings: Findings) -> None:
    """Raise ConfigError or MachineError with every finding; nothing was started."""
    if findings.config:
        raise ConfigError(findings.config, [f"machine: {line}" for line in findings.machine])
    if findings.machine:
        raise MachineError("\n".join(findings.machine))


def _roles(config: RunConfig) -> Iterator[tuple[str, Choice | None]]:
    yield "actor_train", config.actor_train.strategy_args
    yield "actor_infer", config.actor_infer.strategy_args
    # What is not loaded need not be here.
    if assembly.needs_reference(config):
        yield "reference", assembly.role_of(config, "reference").strategy_args
    if config.critic is not None:
        yield "critic", config.critic.strategy_args


def _role_problems(config: RunConfig, role: str, kind: str, choice: Choice | None) -> Iterator[Problem]:
    """What keeps the implementation of a role from being built: its choice, and what it says itself."""
    if choice is None:
        yield Problem(
            f"{role}.strategy_args", "missing. Fix: name a strategy, as in strategy_args: {strategy_name: torch}."
        )
        return
    try:
        found = implementations.there(kind, choice)
    except PluginError as error:
        yield Problem("", str(error))
        return
    if found is None:
        return
    entry, target = found
    if lacks := implementations.incomplete(entry, choice, target):
        yield Problem("", lacks)
        return
    # The model is prepared later, so the path is empty here, as the contracts say.
    plan = (
        assembly.serve_plan(config, Path(), None)
        if kind == "inference_backend"
        else assembly.train_plan(config, role, Path())
    )
    yield from implementations.said(kind, choice, entry, lambda: target.check(plan.config, plan.context))
    try:
        declared(
            BackendCapabilities if kind == "inference_backend" else StrategyCapabilities, choice.name, choice.config
        )
    except PluginError as error:
        yield Problem("", str(error))


def _logger_problems(config: RunConfig) -> Iterator[Problem]:
    """What loggers say themselves, with the place of their options."""
    context = assembly.logger_context(config, {})
    for i, choice in enumerate(config.track_with):
        target = implementations.target("logger", choice)
        if not isinstance(target, ChecksBefore):
            continue
        entry, options = registry().find("logger", choice.name), builders.config_of(choice)
        for problem in implementations.said("logger", choice, entry, partial(target.check, options, context)):
            where = ".".join([f"track_with[{i}]", *filter(None, [problem.path])])
            yield evolve(problem, path=where)


def _environment_variables(config: RunConfig) -> Iterator[str]:
    """Two values of one variable for roles that a runtime keeps in one process."""
    seen: dict[str, tuple[str, str]] = {}
    for role, _ in _roles(config) if assembly.runtime_capabilities(config).one_process else ():
        for name, value in assembly.role_of(config, role).system_envs.items():
            other, before = seen.setdefault(name, (role, value))
            if before != value:
                yield (
                    f"$.{role}.system_envs.{name}: {value!r} here, {before!r} for {other}; runtime"
                    f" {config.runtime.name!r} has one process. Fix: one value for both."
                )


def _transport_problems(config: RunConfig) -> list[str]:
    """What the run would say of trainer and backend together, where each of them alone is fine."""
    for kind, choice in (
        ("train_strategy", config.actor_train.strategy_args),
        ("inference_backend", config.actor_infer.strategy_args),
    ):
        target = implementations.target(kind, choice)
        if target is None or implementations.lacking(kind, target):
            return []
    try:
        chosen_transport = transport.choose(config)
    except ConfigError as error:
        return error.problems
    except PluginError:  # of the runtime: reported elsewhere
        return []
    correction = config.train_infer_correction
    compared = correction is not None and correction.active and config.recompute_old_logprobs == "auto"
    return [transport.COMPARES_WITH_ITSELF] if compared and chosen_transport == "shared" else []


def schedule_problems(config: RunConfig) -> list[str]:
    """What fits neither the schedule, nor the learning rate, nor the number of steps."""
    lines = []
    for name in ("actor_train", "critic"):
        role = getattr(config, name)
        if role is None:
            continue
        where, args = f"{name}.training_args", role.training_args
        try:
            found = schedule_of(args, config.max_steps).check(args.learning_rate, config.max_steps)
        except ConfigError as error:
            lines += [f"$.{where}.{line}" for line in error.problems]
        else:
            lines += [str(evolve(problem, path=f"{where}.{problem.path}")) for problem in found]
    return lines


def _other_problems(config: RunConfig) -> Iterator[str]:
    """Implementations without a role: each is imported; those that are pure arithmetic are built, for they judge their
    settings."""
    contexts = {
        "advantage_estimator": EstimatorContext(seed=config.seed),
        "group_filter": FilterContext(seed=config.seed),
        "batch_adjust": AdjustContext(rows_per_update(config.actor_train), config.rollout_batch_size),
    }
    for kind, choice in chosen(config):
        # Roles were looked at with what they are built with; an environment that is nowhere was reported by the loader.
        if kind in ("inference_backend", "train_strategy") or (kind == "environment" and _absent(choice.name)):
            continue
        try:
            if (found := implementations.there(kind, choice)) is None:
                continue
            entry, target = found
            # Environments take keyword arguments, and managers are built with their tags by `_environment_problems`.
            odd = "" if kind in ("environment", "env_manager") else implementations.signature_problem(target, choice)
            if odd:
                yield (
                    f"{kind} {choice.name!r} (from {entry.owner}) cannot be built with (config, context): {odd}. Fix:"
                    " repair the plugin."
                )
            # Of the object: these members may be set where it is built.
            elif kind in contexts and (
                lacks := implementations.incomplete(entry, choice, builders.build(kind, choice, contexts[kind]))
            ):
                yield lacks
        except TurnwiseError as error:
            yield from str(error).split("\n")
        except Exception as error:  # a stranger's constructor may raise anything
            owner = registry().find(kind, choice.name).owner
            yield (
                f"{kind} {choice.name!r} (from {owner}) cannot be built: {one_line(error)}. Fix: repair the"
                " plugin, or its options."
            )
    for choice in config.baselines:
        if _needs_a_model(choice):
            yield (
                f"$.baselines: {choice.name!r} needs a model, so it is no baseline. Fix: name players, such as random."
            )
    for tag, env in config.custom_envs.items():
        for name, choice in env.samplers.items():
            if _needs_a_model(choice):
                where = f"$.custom_envs.{tag}.samplers.{name}"
                yield (
                    f"{where}: {choice.name!r} needs a model of its own, which a run does not place. Fix: name a"
                    " player, such as openai or random."
                )


def _needs_a_model(choice: Choice) -> bool:
    """Whether a backend that is to play beside the policy is no player; False for one that cannot be asked."""
    target = implementations.target("inference_backend", choice)
    whole = target is not None and not implementations.lacking("inference_backend", target)
    return whole and target.input != "messages"


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
    yield from (
        ("inference_backend" if role == "actor_infer" else "train_strategy", c) for role, c in _roles(config) if c
    )
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
        yield from (("inference_backend", c) for c in env.samplers.values())


def _environment_problems(config: RunConfig, base: Path) -> list[Problem]:
    """Build one environment and the manager of every tag that is played."""
    problems: list[Problem] = []
    for manager in (config.train_env_manager, config.val_env_manager):
        if manager is None or any(_absent(config.custom_envs[tag].env_type) for tag in manager.tags):
            continue
        try:
            assembly.tag_plans(config, manager, GeneratingArgs(), base)
        except TurnwiseError as error:
            lacks = isinstance(error, MachineError)
            problems += [Problem("", line, machine=lacks) for line in str(error).split("\n")]
        except (ValueError, TypeError) as error:
            problems.append(Problem("", f"custom_envs: {one_line(error)}. Fix: correct env_config, or the environment"))
    return problems


def _absent(environment: str) -> bool:
    """Whether no installed plugin brings this environment, which loading the configuration has reported."""
    return not any(entry.name == environment for entry in registry().entries("environment"))


def _source_problems(config: RunConfig, base: Path) -> list[str]:
    try:
        return [str(problem) for problem in assembly.model_source(config, base).check(config.pretrain)]
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
    """Why nothing can be written into `folder`, or the empty string. The folder itself is not made: its nearest parent
    is tried."""
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
