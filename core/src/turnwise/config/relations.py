"""What must hold between keys: ranges, batch arithmetic, sampling, and settings that have no effect together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

from attrs import evolve

from turnwise.config.report import Path, Report
from turnwise.config.schema import CoefRange, EnvManagerConfig, Role, RunConfig
from turnwise.errors import PluginError, did_you_mean
from turnwise.plugins import Registry

Check = Callable[[Any], bool]

POSITIVE: tuple[str, ...] = (
    "max_steps", "rollout_batch_size", "val_batch_size", "sequence_length", "ppo_epochs", "logging_steps", "max_ckpt_to_keep",
    "model_update_buffer_size_mb", "runtime_timeout", "max_grad_norm", "advantage_clip", "reward_clip", "value_clip", "loss_scale_factor",
    "kl_horizon", "target_kl", "num_gpus_per_node",
    "ROLE.training_args.per_device_train_batch_size", "ROLE.training_args.gradient_accumulation_steps", "ROLE.training_args.max_grad_norm",
    "ROLE.model_args.lora_rank", "ROLE.model_args.lora_alpha",
    "ROLE.max_tokens_per_microbatch_in_train", "ROLE.max_tokens_per_microbatch_in_infer", "ROLE.request_timeout", "ROLE.weight_sync_timeout",
    "ROLE.generating_args.max_new_tokens", "MANAGER.generating_args.max_new_tokens",
    "MANAGER.num_env_groups", "MANAGER.group_size", "MANAGER.max_env_num_per_worker", "MANAGER.step_timeout", "MANAGER.reset_timeout",
    "custom_envs.TAG.max_steps", "custom_envs.TAG.max_tokens_per_step", "custom_envs.TAG.max_env_step_concurrent",
)  # fmt: skip
NOT_NEGATIVE: tuple[str, ...] = (
    "seed", "val_seed", "save_steps", "eval_steps", "render_episodes", "init_kl_coef", "kl_loss_coef",
    "ROLE.training_args.learning_rate", "ROLE.training_args.weight_decay", "ROLE.training_args.warmup_steps", "ROLE.infer_batch_size",
    "ROLE.generating_args.temperature", "ROLE.generating_args.top_k", "MANAGER.generating_args.temperature", "MANAGER.generating_args.top_k",
    "MANAGER.max_env_retries",
)  # fmt: skip
SHARES: tuple[str, ...] = ("gamma", "lambd", "ROLE.training_args.warmup_ratio")
TOP_P: tuple[str, ...] = ("ROLE.generating_args.top_p", "MANAGER.generating_args.top_p")

RANGES: tuple[tuple[tuple[str, ...], Check, str], ...] = (
    (POSITIVE, lambda v: 0 < v < math.inf, "must be positive"),
    (NOT_NEGATIVE, lambda v: 0 <= v < math.inf, "must not be negative"),
    (("seed", "val_seed"), lambda v: v < 2**63, "must be below 2^63"),
    (SHARES, lambda v: 0 <= v <= 1, "must be between 0 and 1"),
    (TOP_P, lambda v: 0 < v <= 1, "must be above 0 and at most 1 (1 switches it off)"),
    (("MANAGER.max_env_failure_rate",), lambda v: 0 <= v < 1, "must be at least 0 and below 1 (at 1 a broken environment would be tried for ever)"),
)
ROLES = ("actor_train", "actor_infer", "reference", "critic")
MANAGERS = ("train_env_manager", "val_env_manager")


def check_relations(config: RunConfig, registry: Registry, report: Report) -> RunConfig:
    """Check a converted configuration; returns it without the roles that nothing needs."""
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
    _loss(config, report)
    _correction(config, report)
    _roles(config, report)
    _mock(config, report)
    _updates(config, report)
    _signal(config, registry, report)
    return _needed_roles(config, registry, report)


def _ranges(config: RunConfig, report: Report) -> bool:
    """Whether every number is in its range; the relations are arithmetic on them."""
    fine = True
    for keys, holds, text in RANGES:
        for key in keys:
            for path, value in _values(config, key.split("."), ()):
                if type(value) in (int, float) and not holds(value):
                    report.error(path, f"{value!r}: {path[-1]} {text}. Fix: correct the value")
                    fine = False
    return fine


def _values(value: Any, parts: list[str], path: Path) -> Iterator[tuple[Path, Any]]:
    if not parts:
        yield path, value
        return
    if value is None:
        return
    names = {"ROLE": ROLES, "MANAGER": MANAGERS, "TAG": tuple(value) if isinstance(value, dict) else ()}.get(parts[0], (parts[0],))
    for name in names:
        inner = value[name] if isinstance(value, dict) else getattr(value, name)
        yield from _values(inner, parts[1:], (*path, name))


def _manager(config: RunConfig, name: str, report: Report) -> None:
    """Tags, partition, and groups × size."""
    manager: EnvManagerConfig | None = getattr(config, name)
    if manager is None:
        return
    for i, tag in enumerate(manager.tags):
        if tag not in config.custom_envs:
            known = list(config.custom_envs)
            report.error(
                (name, "tags", i), f"{tag!r} is no tag of custom_envs.{did_you_mean(tag, known)} Tags: {', '.join(known)}. Fix: correct it, or add it"
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
        report.error((name, "num_groups_partition"), f"{text}. Fix: make them equal, or remove the key for an even split")
    batch_key = "rollout_batch_size" if name == "train_env_manager" else "val_batch_size"
    batch, product = getattr(config, batch_key), manager.num_env_groups * manager.group_size
    if batch is not None and batch != product:
        text = f"{batch} is not num_env_groups {manager.num_env_groups} × group_size {manager.group_size} = {product} of {name}"
        report.error((batch_key,), f"{text}. Fix: {batch_key}: {product}{_groups_that_fit(batch, manager)}")


def _groups_that_fit(batch: int, manager: EnvManagerConfig) -> str:
    return "" if batch % manager.group_size else f", or num_env_groups: {batch // manager.group_size}"


def _sampling(config: RunConfig, report: Report) -> None:
    """Lengths and temperatures, for training and evaluation."""
    train = config.train_env_manager.generating_args
    train_path: Path = ("train_env_manager", "generating_args") if train else ("actor_infer", "generating_args")
    uses = [(train_path, train or config.actor_infer.generating_args)]
    val = config.val_env_manager
    if val is not None and val.generating_args is not None:
        uses.append((("val_env_manager", "generating_args"), val.generating_args))
    for path, args in uses:
        if args.max_new_tokens >= config.sequence_length:
            text = f"max_new_tokens {args.max_new_tokens} leaves no room for a prompt in sequence_length {config.sequence_length}"
            report.error((*path, "max_new_tokens"), f"{text}. Fix: lower it, or raise sequence_length")
    if uses[0][1].temperature == 0:
        report.error((*train_path, "temperature"), "training samples at temperature 0: every member of a group plays the same. Fix: temperature: 1")
    if val is not None and val.group_size > 1 and val.generating_args is not None and val.generating_args.temperature == 0:
        text = (
            f"the {val.group_size} members of a group play the same: val_env_manager.group_size {val.group_size} with generating_args.temperature 0"
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
        report.error(("eval_steps",), f"{config.eval_steps}: there is nothing to evaluate on. Fix: add val_env_manager, or eval_steps: 0")


def _kl(config: RunConfig, report: Report) -> None:
    """The field's booleans must agree with the coefficients, which alone switch the terms on."""
    for flag, coefficient in (("add_token_level_kl", "init_kl_coef"), ("use_kl_loss", "kl_loss_coef")):
        wanted, value = getattr(config, flag), getattr(config, coefficient)
        if wanted is not None and wanted != (value > 0):
            fix = f"{coefficient} above 0, or {flag}: false" if wanted else f"{coefficient}: 0, or {flag}: true"
            report.error((flag,), f"{str(wanted).lower()} disagrees with {coefficient} {value}, which alone switches the term on. Fix: {fix}")
    if config.target_kl is not None and config.init_kl_coef == 0:
        report.warn(("target_kl",), "has no effect: init_kl_coef is 0")
    if config.kl_in_score and config.init_kl_coef == 0:
        report.warn(("kl_in_score",), "has no effect: init_kl_coef is 0")
    entropy = config.entropy_loss_coef
    if any(not math.isfinite(v) for v in ((entropy.start, entropy.end) if isinstance(entropy, CoefRange) else (entropy,))):
        report.error(("entropy_loss_coef",), f"{entropy!r} is not finite. Fix: a number such as 0.001")


def _loss(config: RunConfig, report: Report) -> None:
    """What the loss's config class says of itself (turnwise.contracts.loss); the loss is torch, and is not imported to read a configuration."""
    loss, name = config.pg_variant.config, config.pg_variant.name
    if config.ratio_type == "segment" and (getattr(loss, "own_ratio", False) or _ignores_ratio(config)):
        report.warn(("ratio_type",), f"has no effect: pg_variant {name!r} does not use the ratio that it chooses")
    if not getattr(loss, "depends_on_rows", False):
        return
    for tag, env in config.custom_envs.items():
        if getattr(env.env_manager.config, "merge_steps", False):
            text = f"joins turns into rows, and pg_variant {name!r} has a ratio per row: the loss depends on how well turns join"
            report.warn(("custom_envs", tag, "env_manager", "merge_steps"), f"{text}. Fix: gspo_level: segment")


def _correction(config: RunConfig, report: Report) -> None:
    """Bounds, and what a correction of trainer against sampler cannot stand beside."""
    correction, path = config.train_infer_correction, ("train_infer_correction",)
    if correction is None:
        return
    weight = correction.is_weight
    if weight.enabled and (weight.lower_bound or 0.0) > (math.inf if weight.upper_bound is None else weight.upper_bound):
        report.error((*path, "is_weight", "lower_bound"), f"{weight.lower_bound} is above upper_bound {weight.upper_bound}. Fix: lower it")
    for i, one in enumerate(correction.filters):
        if one.enabled and not one.active:
            report.warn((*path, "filters", i), "has no effect: neither ratio_enabled nor diff_enabled is true")
        for on, name in ((one.ratio_enabled, "ratio"), (one.diff_enabled, "diff")):
            low, high = getattr(one, f"{name}_low"), getattr(one, f"{name}_high")
            if one.enabled and on and low > high:
                report.error((*path, "filters", i, f"{name}_low"), f"{low} is above {name}_high {high}: no token would train. Fix: lower it")
    if correction.active and config.recompute_old_logprobs == "false":
        text = "false: then old log-probs are the sampler's, and train_infer_correction has nothing to compare them with"
        report.error(("recompute_old_logprobs",), f"{text}. Fix: recompute_old_logprobs: true")
    if weight.enabled and getattr(config.pg_variant.config, "needs_infer_log_probs", False):
        text = f"true beside pg_variant {config.pg_variant.name!r}, whose own ratio is that to the sampler: it would count twice"
        report.error((*path, "is_weight", "enabled"), f"{text}. Fix: is_weight: {{enabled: false}}")


def _mock(config: RunConfig, report: Report) -> None:
    if config.rollout_mock.enable and not config.rollout_mock.dump_dir:
        report.error(("rollout_mock",), "says not where the rollouts are. Fix: rollout_mock: {enable: true, mode: dump, dump_dir: FOLDER}")


def _without_effect(config: RunConfig, report: Report) -> None:
    """Keys that nothing reads: a backend cuts its batches itself, and some options belong to a choice that was not made."""
    for key in ("use_dynamic_batching_in_train", "use_dynamic_batching_in_infer", "use_sequence_packing"):
        if getattr(config.actor_infer, key):
            report.warn(("actor_infer", key), "has no effect: the backend cuts its own batches (infer_batch_size)")
    estimator = config.adv_estimator
    if config.gamma != 1.0 and not hasattr(estimator.config, "gamma") and config.init_kl_coef == 0:
        turns = "; the discount from turn to turn is step_reward_gamma" if hasattr(estimator.config, "step_reward_gamma") else ""
        report.warn(("gamma",), f"has no effect: adv_estimator {estimator.name!r} discounts no tokens{turns}")
    if config.value_clip is not None and config.critic is None:
        report.warn(("value_clip",), "has no effect: there is no critic")
    if config.loss_scale_factor is not None and config.loss_agg_mode != "seq-mean-token-sum-norm":
        report.warn(("loss_scale_factor",), f"has no effect: loss_agg_mode is {config.loss_agg_mode}. Fix: seq-mean-token-sum-norm")
    loss = config.pg_variant.config
    if getattr(loss, "dual_clip_c", None) is not None and getattr(loss, "dual_clip_loss", None) is False:
        report.warn(("dual_clip_c",), "has no effect: dual_clip_loss is false. Fix: dual_clip_loss: true")


def _adapters(config: RunConfig, report: Report) -> None:
    """The rank alone switches LoRA on."""
    for name in ("actor_train", "critic"):
        role: Role | None = getattr(config, name)
        for key in ("lora_alpha", "lora_target"):
            if role is not None and role.model_args.lora_rank is None and getattr(role.model_args, key) is not None:
                report.warn((name, "model_args", key), "has no effect: lora_rank is null, which trains the whole model")
    for name in ROLES:
        role = getattr(config, name)
        if role is not None and role.model_args.lora_sync != "merged" and (name != "actor_train" or role.model_args.lora_rank is None):
            why = "lora_rank is null, which trains the whole model" if name == "actor_train" else "only actor_train sends weights"
            report.warn((name, "model_args", "lora_sync"), f"has no effect: {why}")


def _trackers(config: RunConfig, report: Report) -> None:
    """Two loggers of one name would write the same files."""
    named = [choice.name for choice in config.track_with]
    for i, name in enumerate(named):
        if name in named[:i]:
            report.error(("track_with", i), f"{name!r} is named twice. Fix: keep one")


def _roles(config: RunConfig, report: Report) -> None:
    """Devices and token budgets."""
    for name in ROLES:
        role: Role | None = getattr(config, name)
        if role is None:
            continue
        devices = role.device_mapping
        if len(set(devices)) != len(devices) or any(d < 0 for d in devices):
            report.error((name, "device_mapping"), f"{list(devices)} names a device twice, or one below 0. Fix: each device once")
        phases: tuple[Literal["train", "infer"], ...] = ("train", "infer")
        for phase in phases:
            key = f"max_tokens_per_microbatch_in_{phase}"
            if token_budget(config, role, phase) is not None or getattr(role, f"use_dynamic_batching_in_{phase}"):
                _budget(config, name, key, token_budget(config, role, phase), report)
            elif getattr(role, key) is not None:
                report.warn((name, key), f"has no effect without use_dynamic_batching_in_{phase}: true or use_sequence_packing: true")


def _budget(config: RunConfig, name: str, key: str, budget: int | None, report: Report) -> None:
    flag = key.replace("max_tokens_per_microbatch", "use_dynamic_batching")
    if budget is None:
        report.error((name, flag), f"needs a token budget. Fix: {key}: N, at least sequence_length {config.sequence_length}")
    elif budget < config.sequence_length:
        report.error((name, key), f"{budget} cannot hold one sample of sequence_length {config.sequence_length}. Fix: raise it")


def token_budget(config: RunConfig, role: Role, phase: Literal["train", "infer"]) -> int | None:
    """Tokens of a micro-batch, where they bound it instead of a number of rows: sequence_length for packed rows without a budget of their own."""
    budget: int | None = getattr(role, f"max_tokens_per_microbatch_in_{phase}")
    if role.use_sequence_packing:
        return config.sequence_length if budget is None else budget
    return budget if getattr(role, f"use_dynamic_batching_in_{phase}") else None


def data_parallel_size(role: Role) -> int:
    """How many ranks of a role see different rows, by its strategy's own arithmetic."""
    world = max(1, len(role.device_mapping))
    config: Any = role.strategy_args.config if role.strategy_args else None
    return int(config.data_parallel_size(world)) if hasattr(config, "data_parallel_size") else 1


def rows_per_update(role: Role) -> int:
    """U: per device × accumulation × data-parallel size."""
    return role.training_args.per_device_train_batch_size * role.training_args.gradient_accumulation_steps * data_parallel_size(role)


def _updates(config: RunConfig, report: Report) -> None:
    """by_trajectory makes rollout_batch_size / U updates, so U must divide it; and a loss without a ratio wants one update a step."""
    batch = config.rollout_batch_size
    trained = [name for name in ("actor_train", "critic") if getattr(config, name) is not None]
    for name in trained:
        role = getattr(config, name)
        try:
            ranks, unit = data_parallel_size(role), rows_per_update(role)
        except ValueError as error:
            report.error((name, "device_mapping"), f"{error}. Fix: correct the devices, or the sizes in strategy_config")
            continue
        args = role.training_args
        if config.batch_adjust_mode.name == "by_trajectory" and (unit <= 0 or batch % unit):
            sizes = f"per_device_train_batch_size {args.per_device_train_batch_size} × gradient_accumulation_steps {args.gradient_accumulation_steps}"
            mini = args.per_device_train_batch_size * ranks
            fix = (
                f"gradient_accumulation_steps: {_divisor(batch // mini, args.gradient_accumulation_steps)}" if batch % mini == 0 else "make it divide"
            )
            text = f"U = {sizes} × data-parallel size {ranks} = {unit} does not divide rollout_batch_size {batch}"
            report.error((name, "training_args", "gradient_accumulation_steps"), f"{text}. Fix: {fix}")
        elif name == "actor_train" and _ignores_ratio(config) and -(-batch // unit) * config.ppo_epochs > 1:
            text = (
                f"{config.pg_variant.name!r} has no ratio to the old policy, and a step makes about {-(-batch // unit) * config.ppo_epochs} updates"
            )
            report.warn(("pg_variant",), f"{text}: all but the first train on another policy's samples. Fix: one update a step, or pg_variant: ppo")


def _divisor(most: int, wanted: int) -> int:
    """The divisor of `most` that is nearest to `wanted`."""
    return min((d for d in range(1, most + 1) if most % d == 0), key=lambda d: (abs(d - wanted), d))


def _ignores_ratio(config: RunConfig) -> bool:
    """As the loss's config class declares it; the loss itself is torch, and is not imported to read a configuration."""
    return getattr(config.pg_variant.config, "uses_ratio", True) is False


def _signal(config: RunConfig, registry: Registry, report: Report) -> None:
    """A group of one has no mean but its own: estimators that compare trajectories within groups give 0."""
    if config.train_env_manager.group_size > 1:
        return
    given = config.reward_normalization
    own = getattr(config.adv_estimator.config, "reward_normalization", None)
    settings = own or given
    name = config.adv_estimator.name
    declared = getattr(_target(config, registry), "compares_in_groups", None)
    grouped = bool(declared)
    if settings is not None and settings.grouping in ("batch", "tags"):
        grouped = False
    if declared is not False and settings is not None and settings.method in ("mean", "mean_std") and settings.grouping in (None, "traj_group_id"):
        grouped = True
    if grouped:
        report.warn(("train_env_manager", "group_size"), f"group_size 1 leaves {name!r} no other trajectory to compare with. Fix: group_size: 8")


def _target(config: RunConfig, registry: Registry) -> Any:
    try:
        return registry.find("advantage_estimator", config.adv_estimator.name).target()
    except PluginError:
        return None  # a package is missing: `check` tells


def _needed_roles(config: RunConfig, registry: Registry, report: Report) -> RunConfig:
    """The critic only where values are needed, the reference only where a KL coefficient is positive."""
    target = _target(config, registry)
    needs = getattr(target, "needs", None)
    if needs is not None and "values" in needs and config.critic is None:
        text = f"adv_estimator {config.adv_estimator.name!r} needs the values of a critic"
        report.error(("adv_estimator",), f"{text}. Fix: critic: {{strategy_args: …, training_args: …}}, or another estimator")
    if needs is not None and "values" not in needs and config.critic is not None:
        report.warn(("critic",), f"is not loaded: adv_estimator {config.adv_estimator.name!r} needs no values")
        config = evolve(config, critic=None)
    if config.reference is not None and config.init_kl_coef == 0 and config.kl_loss_coef == 0:
        report.warn(("reference",), "is not loaded: neither init_kl_coef nor kl_loss_coef is positive")
        config = evolve(config, reference=None)
    return config
