"""What must hold between keys: ranges, batch arithmetic, sampling, and settings that have no effect together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from attrs import evolve, fields_dict

from turnwise.config.asynchronous import check_asynchronous, check_stalls
from turnwise.config.correction import check_correction
from turnwise.config.estimators import asked, check_estimator
from turnwise.config.problems import Path, Report
from turnwise.config.schema import MANAGERS, ROLES, UNKNOWN, Choice, EnvManagerConfig, Role, RunConfig
from turnwise.config.updates import check_budget, check_updates, loss_capabilities, token_budget
from turnwise.contracts.capabilities import ChecksRun
from turnwise.data.ranges import faults
from turnwise.errors import Problem, did_you_mean, one_line
from turnwise.importing import StrangerError, guarded
from turnwise.plugins import Registry


def check_relations(config: RunConfig, registry: Registry, report: Report) -> RunConfig:
    """Check a converted configuration; returns it without the roles that nothing needs."""
    # Everything below divides and multiplies these numbers; outside their ranges it would report nonsense, or raise.
    if not _ranges(config, report):
        return config
    for manager in MANAGERS:
        _manager(config, manager, report)
    _sampling(config, report)
    _schedule(config, report)
    _kl(config, report)
    _trackers(config, report)
    _without_effect(config, report)
    _adapters(config, report)
    _loss(config, registry, report)
    # Before the correction is looked at: playing ahead may have switched it on.
    config = check_stalls(check_asynchronous(config, registry, report), report)
    check_correction(config, registry, report)
    _roles(config, report)
    _mock(config, report)
    check_updates(config, registry, report)
    _own(config, report)
    check_estimator(config, registry, report)
    # Last: what is written of a role is checked also where this run does not load it.
    return _needed_roles(config, registry, report)


def _ranges(config: RunConfig, report: Report) -> bool:
    """Whether every number is in the range that stands beside its key; the relations are arithmetic on them."""
    found = list(faults(config))
    for path, value, fault in found:
        report.error(path, f"{value!r}: {path[-1]} {fault}. Fix: correct the value")
    return not found


def _manager(config: RunConfig, name: str, report: Report) -> None:
    """Tags, partition, and groups × size."""
    manager: EnvManagerConfig | None = getattr(config, name)
    if manager is None:
        return
    for i, tag in enumerate(manager.tags):
        if tag not in config.custom_envs:
            known = list(config.custom_envs)
            report.error(
                (name, "tags", i),
                f"{tag!r} is no tag of custom_envs.{did_you_mean(tag, known)} Tags: {', '.join(known)}. Fix: correct"
                " it, or add it",
            )
        if tag in manager.tags[:i]:
            report.error((name, "tags", i), f"{tag!r} is named twice. Fix: keep one, and give it the groups of both")
    parts = manager.num_groups_partition
    if len(parts) != len(manager.tags):
        report.error(
            (name, "num_groups_partition"),
            f"{list(parts)} for {len(manager.tags)} tags. Fix: one number per tag, or remove the key for an even split",
        )
    elif sum(parts) != manager.num_env_groups or min(parts) < 0:
        text = f"{list(parts)} adds up to {sum(parts)}, num_env_groups is {manager.num_env_groups}"
        report.error(
            (name, "num_groups_partition"), f"{text}. Fix: make them equal, or remove the key for an even split"
        )
    batch_key = "rollout_batch_size" if name == "train_env_manager" else "val_batch_size"
    batch, product = getattr(config, batch_key), manager.num_env_groups * manager.group_size
    # The field writes both, and a slip in one of them would be another batch that trains all the same.
    if batch is not None and batch != product:
        text = (
            f"{batch} is not num_env_groups {manager.num_env_groups} × group_size {manager.group_size} = {product} of"
            f" {name}"
        )
        report.error((batch_key,), f"{text}. Fix: {batch_key}: {product}{_groups_that_fit(batch, manager)}")


def _groups_that_fit(batch: int, manager: EnvManagerConfig) -> str:
    return "" if batch % manager.group_size else f", or num_env_groups: {batch // manager.group_size}"


def _sampling(config: RunConfig, report: Report) -> None:
    """Lengths and temperatures, for training and evaluation."""
    # Training samples with actor_infer's arguments unless the manager has its own, and the message must blame the block
    # that counts.
    train = config.train_env_manager.generating_args
    train_path: Path = ("train_env_manager", "generating_args") if train else ("actor_infer", "generating_args")
    uses = [(train_path, train or config.actor_infer.generating_args)]
    val = config.val_env_manager
    if val is not None and val.generating_args is not None:
        uses.append((("val_env_manager", "generating_args"), val.generating_args))
    for path, args in uses:
        if args.max_new_tokens >= config.sequence_length:
            text = (
                f"max_new_tokens {args.max_new_tokens} leaves no room for a prompt in sequence_length"
                f" {config.sequence_length}"
            )
            own: Path = (*path, "max_new_tokens")
            # A default of max_new_tokens that does not fit is blamed on the key that the user wrote.
            blamed = own if report.sources.wrote(own) else ("sequence_length",)
            report.error(blamed, f"{text}. Fix: lower the one, or raise the other")
    if uses[0][1].temperature == 0:
        report.error(
            (*train_path, "temperature"),
            "training samples at temperature 0: every member of a group plays the same. Fix: temperature: 1",
        )
    if (
        val is not None
        and val.group_size > 1
        and val.generating_args is not None
        and val.generating_args.temperature == 0
    ):
        text = (
            f"the {val.group_size} members of a group play the same: val_env_manager.group_size {val.group_size} with"
            " generating_args.temperature 0"
        )
        report.warn(("val_env_manager", "group_size"), text)
    longest = max(args.max_new_tokens for _, args in uses)
    for tag, env in config.custom_envs.items():
        if env.max_tokens_per_step is not None and env.max_tokens_per_step > longest:
            text = f"{env.max_tokens_per_step} has no effect: max_new_tokens is {longest}"
            report.warn(("custom_envs", tag, "max_tokens_per_step"), text)


def _schedule(config: RunConfig, report: Report) -> None:
    for name in ("actor_train", "critic"):
        role: Role | None = getattr(config, name)
        if role is None:
            continue
        args, path = role.training_args, (name, "training_args")
        if args.warmup_steps > config.max_steps:
            text = f"{args.warmup_steps} is more than max_steps {config.max_steps} (both count pipeline steps)"
            report.error((*path, "warmup_steps"), f"{text}. Fix: lower it")
        if args.warmup_steps and args.warmup_ratio:
            report.warn((*path, "warmup_ratio"), f"has no effect beside warmup_steps {args.warmup_steps}")
    if config.eval_steps and config.val_env_manager is None:
        report.error(
            ("eval_steps",),
            f"{config.eval_steps}: there is nothing to evaluate on. Fix: add val_env_manager, or eval_steps: 0",
        )


def _kl(config: RunConfig, report: Report) -> None:
    """The field's booleans must agree with the coefficients, which alone switch the terms on."""
    # The field has switches beside its coefficients, and files in which they disagree: nobody can tell which was meant.
    for flag, coefficient in (("add_token_level_kl", "init_kl_coef"), ("use_kl_loss", "kl_loss_coef")):
        wanted, value = getattr(config, flag), getattr(config, coefficient)
        if wanted is not None and wanted != (value > 0):
            fix = f"{coefficient} above 0, or {flag}: false" if wanted else f"{coefficient}: 0, or {flag}: true"
            report.error(
                (flag,),
                f"{str(wanted).lower()} disagrees with {coefficient} {value}, which alone switches the term on. Fix:"
                f" {fix}",
            )
    if config.target_kl is not None and config.init_kl_coef == 0:
        report.warn(("target_kl",), "has no effect: init_kl_coef is 0")
    if config.kl_in_score and config.init_kl_coef == 0:
        report.warn(("kl_in_score",), "has no effect: init_kl_coef is 0")


def _loss(config: RunConfig, registry: Registry, report: Report) -> None:
    """Settings that the chosen loss has no use for."""
    known = loss_capabilities(config, registry)
    if config.ratio_type == "segment" and (known.own_ratio or not known.uses_ratio):
        report.warn(
            ("ratio_type",),
            f"has no effect: pg_variant {config.pg_variant.name!r} does not use the ratio that it chooses",
        )


def _own(config: RunConfig, report: Report) -> None:
    """What the chosen implementations' config classes say of the run (turnwise.contracts.capabilities.ChecksRun)."""
    for path, choice in _choices(config):
        for problem in _said(choice, config, path, report):
            # An implementation speaks of its own options, or by `$.` of any key of the run.
            whole = problem.path.startswith("$.")
            key = (*(() if whole else path), *problem.path.removeprefix("$.").split(".")) if problem.path else path
            if problem.warning:
                report.warn(key, problem.text)
            elif problem.machine:
                report.lack(key, problem.text, "(not needed to plan)")
            else:
                report.error(key, problem.text)


def _said(choice: Choice, config: RunConfig, path: Path, report: Report) -> list[Problem]:
    """The problems that a config class finds; a check that fails is a broken plugin, and not the end of the report."""
    if not isinstance(choice.config, ChecksRun):
        return []
    try:
        with guarded():
            found = list(choice.config.check(config))
            if odd := [one for one in found if not isinstance(one, Problem)]:
                raise TypeError(f"it gave {odd[0]!r:.60}, which is no turnwise.errors.Problem")
        return found
    except StrangerError as failure:
        report.error(
            path,
            f"the check of {choice.name!r} failed: {one_line(failure.error)}. Fix: repair the plugin, or name another"
            " implementation",
        )
        return []


def _choices(config: RunConfig) -> Iterator[tuple[Path, Choice]]:
    """Every implementation that the run names, with the path of its options."""
    for name in ("adv_estimator", "pg_variant", "batch_adjust_mode", "runtime", "model_source"):
        yield (name,), getattr(config, name)
    for name in ("group_filters", "track_with", "baselines"):
        yield from (((name, i), choice) for i, choice in enumerate(getattr(config, name)))
    # No environments: what their constructors take was checked by annotations.
    yield from ((("custom_envs", tag, "env_manager"), env.env_manager) for tag, env in config.custom_envs.items())
    for name in ROLES:
        role: Role | None = getattr(config, name)
        if role is not None and role.strategy_args is not None:
            yield (name, "strategy_args", "strategy_config"), role.strategy_args


def _mock(config: RunConfig, report: Report) -> None:
    if config.rollout_mock.enable and not config.rollout_mock.dump_dir:
        report.error(
            ("rollout_mock",),
            "says not where the rollouts are. Fix: rollout_mock: {enable: true, mode: dump, dump_dir: FOLDER}",
        )


def _without_effect(config: RunConfig, report: Report) -> None:
    """Keys that nothing reads: a backend cuts its batches itself, and some options belong to a choice that was not
    made."""
    for key in ("use_dynamic_batching_in_train", "use_dynamic_batching_in_infer", "use_sequence_packing"):
        if getattr(config.actor_infer, key):
            report.warn(("actor_infer", key), "has no effect: the backend cuts its own batches (infer_batch_size)")
    estimator = config.adv_estimator
    options = fields_dict(type(estimator.config)) if estimator.config is not None else {}
    # A KL penalty in the reward is discounted by it, whatever the estimator does.
    if config.gamma != 1.0 and "gamma" not in options and config.init_kl_coef == 0:
        report.warn(("gamma",), f"has no effect: adv_estimator {estimator.name!r} discounts no tokens")
    if config.value_clip is not None and config.critic is None:
        report.warn(("value_clip",), "has no effect: there is no critic")
    if config.loss_scale_factor is not None and config.loss_agg_mode != "seq-mean-token-sum-norm":
        report.warn(
            ("loss_scale_factor",),
            f"has no effect: loss_agg_mode is {config.loss_agg_mode}. Fix: seq-mean-token-sum-norm",
        )


def _adapters(config: RunConfig, report: Report) -> None:
    """The rank alone switches LoRA on."""
    for name in ("actor_train", "critic"):
        role: Role | None = getattr(config, name)
        for key in ("lora_alpha", "lora_target"):
            if role is not None and role.model_args.lora_rank is None and getattr(role.model_args, key) is not None:
                report.warn((name, "model_args", key), "has no effect: lora_rank is null, which trains the whole model")
    for name in ROLES:
        role = getattr(config, name)
        if (
            role is not None
            and role.model_args.lora_sync != "merged"
            and (name != "actor_train" or role.model_args.lora_rank is None)
        ):
            why = (
                "lora_rank is null, which trains the whole model"
                if name == "actor_train"
                else "only actor_train sends weights"
            )
            report.warn((name, "model_args", "lora_sync"), f"has no effect: {why}")


def _trackers(config: RunConfig, report: Report) -> None:
    """Two loggers of one name would write the same files."""
    named = [choice.name for choice in config.track_with]
    for i, name in enumerate(named):
        # What could not be looked up is reported already, however often.
        if name != UNKNOWN and name in named[:i]:
            report.error(("track_with", i), f"{name!r} is named twice. Fix: keep one")


def _roles(config: RunConfig, report: Report) -> None:
    """Devices and token budgets."""
    for name in ROLES:
        role: Role | None = getattr(config, name)
        if role is None:
            continue
        devices = role.device_mapping
        if len(set(devices)) != len(devices) or any(d < 0 for d in devices):
            report.error(
                (name, "device_mapping"), f"{list(devices)} names a device twice, or one below 0. Fix: each device once"
            )
        phases: tuple[Literal["train", "infer"], ...] = ("train", "infer")
        for phase in phases:
            key = f"max_tokens_per_microbatch_in_{phase}"
            if token_budget(config, role, phase) is not None or getattr(role, f"use_dynamic_batching_in_{phase}"):
                check_budget(config, name, key, token_budget(config, role, phase), report)
            elif getattr(role, key) is not None:
                report.warn(
                    (name, key),
                    f"has no effect without use_dynamic_batching_in_{phase}: true or use_sequence_packing: true",
                )


def _needed_roles(config: RunConfig, registry: Registry, report: Report) -> RunConfig:
    """The critic only where values are needed, the reference only where a KL coefficient is positive."""
    known = asked(config, registry)
    if known is not None and "values" not in known.needs and config.critic is not None:
        report.warn(("critic",), f"is not loaded: adv_estimator {config.adv_estimator.name!r} needs no values")
        config = evolve(config, critic=None)
    if config.reference is not None and config.init_kl_coef == 0 and config.kl_loss_coef == 0:
        report.warn(("reference",), "is not loaded: neither init_kl_coef nor kl_loss_coef is positive")
        config = evolve(config, reference=None)
    return config
