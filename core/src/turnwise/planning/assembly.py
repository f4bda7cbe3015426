"""From a configuration to the things that a run is made of: model folder, roles, environment plans, loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, evolve

from turnwise.config.masking import without_secrets
from turnwise.config.schema import Choice, CustomEnv, EnvManagerConfig, ModelArgs, Role, RunConfig
from turnwise.config.updates import token_budget
from turnwise.contracts.chat import Chat, Message, ModelSource, ModelSourceContext
from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.contracts.environment import EnvironmentCapabilities
from turnwise.contracts.inference import BackendCapabilities, GeneratingArgs, InferenceBackend, InferenceContext
from turnwise.contracts.logger import Logger, LoggerContext
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.contracts.runtime import Runtime, RuntimeCapabilities, RuntimeContext, ServePlan, TrainPlan
from turnwise.contracts.train import Lora, LossChoice, Objective, TrainContext
from turnwise.declared import declared, declared_if_there
from turnwise.devices import visible_gpus
from turnwise.errors import ConfigError
from turnwise.planning import placement
from turnwise.planning.builders import EnvironmentBuilder, ManagerBuilder, PlayerBuilder, build, config_of
from turnwise.rollout import Scheduler
from turnwise.rollout.texts import environment_texts
from turnwise.rollout.trial import number_of_tasks


@define
class Folders:
    """Where a run writes."""

    output: Path
    checkpoints: Path
    cache: Path
    logs: Path
    frames: Path | None

    @classmethod
    def of(cls, config: RunConfig) -> Folders:
        """The folders of a configuration (nothing is created)."""
        output = Path(config.output_dir)
        return cls(
            output=output,
            checkpoints=output / "checkpoints",
            cache=output / "model",
            logs=Path(config.logging_dir) if config.logging_dir else output,
            frames=Path(config.render_save_dir) if config.render_save_dir else None,
        )


def tag_plans(config: RunConfig, manager: EnvManagerConfig, args: GeneratingArgs, base: Path) -> list[TagPlan]:
    """What is played for training or evaluation: one plan per tag, with its environments, manager and limits."""
    plans = []
    for tag, groups in zip(manager.tags, manager.num_groups_partition, strict=True):
        env = config.custom_envs[tag]
        builder = EnvironmentBuilder(env.env_type, env.env_config, plugins=config.plugins, base=str(base))
        managed = ManagerBuilder(
            env.env_manager,
            ManagerContext(tag=tag, max_turns=env.max_steps),
            plugins=config.plugins,
            base=str(base),
        )
        plans.append(
            TagPlan(
                tag=tag,
                build=builder,
                manager=build("env_manager", managed.choice, managed.context),
                manager_builder=managed,
                limits=limits(config, env, args),
                groups=groups,
                group_size=manager.group_size,
                step=env.step,
                max_concurrent_steps=env.max_env_step_concurrent,
                samplers={
                    name: PlayerBuilder(choice, config.seed, plugins=config.plugins, base=str(base))
                    for name, choice in env.samplers.items()
                },
                # Asked of an environment that is built for it: the tasks have to be known before an episode is.
                replayable=declared(EnvironmentCapabilities, env.env_type, None).replayable,
                num_tasks=number_of_tasks(builder, tag, env.env_type, env.env_config, manager.reset_timeout),
            )
        )
    return plans


def limits(config: RunConfig, env: CustomEnv, args: GeneratingArgs) -> Limits:
    """The token and turn limits of a tag."""
    return Limits(
        sequence_length=config.sequence_length,
        max_new_tokens=args.max_new_tokens,
        max_tokens_per_step=env.max_tokens_per_step or args.max_new_tokens,
        max_turns=env.max_steps,
    )


def scheduler(
    config: RunConfig,
    base: Path,
    backend: InferenceBackend,
    chat: Chat | None,
    *,
    evaluation: bool,
    runtime: Runtime | None = None,
) -> Scheduler:
    """The rollout scheduler of training, or of evaluation with its own seed, tasks and generating arguments. Episodes
    are played by the workers of `runtime` where it has any."""
    manager = config.val_env_manager if evaluation else config.train_env_manager
    assert manager is not None
    args = manager.generating_args or config.actor_infer.generating_args
    settings = RolloutSettings(
        seed=config.val_seed if evaluation else config.seed,
        step_timeout=manager.step_timeout,
        reset_timeout=manager.reset_timeout,
        request_timeout=config.actor_infer.request_timeout,
        max_env_retries=manager.max_env_retries,
        max_env_failure_rate=manager.max_env_failure_rate,
        max_concurrent=manager.max_env_num_per_worker,
        evaluation=evaluation,
        generating_args=args,
        async_generation_ratio=config.async_generation_ratio,
        # An evaluation is a batch of its own and ends by itself.
        max_steps=None if evaluation else config.max_steps,
        stall_timeout=config.stall_timeout,
        weight_update=config.weight_update,
    )
    # A backend that takes messages renders them itself: a chat format here would be a second one.
    plans, chat = tag_plans(config, manager, args, base), chat if backend.input == "ids" else None
    executor = None if runtime is None else runtime.executor(plans, settings, chat, backend)
    return Scheduler(plans, settings, backend, chat, executor)


def model_source(
    config: RunConfig, base: Path, tokenizer: Path | None = None, stopping: Callable[[], bool] = lambda: False
) -> ModelSource:
    """The source that prepares `pretrain`; a recipe takes `tokenizer` (a checkpoint's), or asks for the environments'
    texts and makes one: `stopping` ends that (`environment_texts`)."""
    folders = Folders.of(config)
    trust = config.trust_remote_code
    context = ModelSourceContext(
        cache=folders.cache,
        seed=config.seed,
        # Asked for only where a tokenizer is made: it plays episodes.
        texts=lambda: texts(config, base, stopping),
        trust_remote_code=trust,
        tokenizer=tokenizer,
    )
    source: ModelSource = build("model_source", config.model_source, context)
    return source


def texts(config: RunConfig, base: Path, stopping: Callable[[], bool] = lambda: False) -> Iterable[Message]:
    """Every text that the environments and their managers would show a model in a few random episodes; `stopping` as in
    `environment_texts`."""
    managers = [m for m in (config.train_env_manager, config.val_env_manager) if m is not None]
    args = config.actor_infer.generating_args
    plans = {plan.tag: (plan, m) for m in managers for plan in tag_plans(config, m, args, base)}
    return environment_texts(list(plans.values()), config.seed, stopping)


def inference_context(config: RunConfig, model: Path | None, chat: Chat | None) -> InferenceContext:
    """What the sampling role is built with."""
    role = config.actor_infer
    return InferenceContext(
        model=model,
        chat=chat,
        seed=config.seed,
        dtype=role.model_args.dtype,
        attn_implementation=role.model_args.attn_implementation,
        devices=devices(config)["actor_infer"],
        sequence_length=config.sequence_length,
        infer_batch_size=role.infer_batch_size,
        weight_sync_timeout=role.weight_sync_timeout,
        lora=adapters_alone(config),
        sleeps=bool(turns(config)),
        trust_remote_code=config.trust_remote_code,
    )


def train_context(config: RunConfig, role: Role, name: str, model: Path) -> TrainContext:
    """What a training role is built with. The reference shares the actor's settings of the model where it has none of
    its own."""
    args = role.training_args
    return TrainContext(
        model=model,
        role=name,
        head="value" if name == "critic" else "lm",
        trainable=name != "reference",
        seed=config.seed,
        devices=devices(config)[name],
        dtype=role.model_args.dtype,
        attn_implementation=role.model_args.attn_implementation,
        gradient_checkpointing=not role.model_args.disable_gradient_checkpointing,
        # The one that samples: log-probs are of logits divided by it.
        temperature=(config.train_env_manager.generating_args or config.actor_infer.generating_args).temperature,
        objective=objective(config),
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm if args.max_grad_norm is not None else config.max_grad_norm,
        per_device_train_batch_size=args.per_device_train_batch_size,
        infer_batch_size=role.infer_batch_size or args.per_device_train_batch_size,
        max_tokens_per_microbatch_in_train=token_budget(config, role, "train"),
        max_tokens_per_microbatch_in_infer=token_budget(config, role, "infer"),
        use_sequence_packing=role.use_sequence_packing,
        lora=lora(role.model_args),
        frozen=role.model_args.freeze_module_prefix,
        bucket_bytes=config.model_update_buffer_size_mb * 2**20,
        weight_sync_timeout=config.actor_infer.weight_sync_timeout,
        runtime_timeout=config.runtime_timeout,
        trust_remote_code=config.trust_remote_code,
    )


def lora(args: ModelArgs) -> Lora | None:
    """The adapters that a role trains, if it does; alpha defaults to the rank (a scale of 1)."""
    if args.lora_rank is None:
        return None
    return Lora(
        args.lora_rank, args.lora_rank if args.lora_alpha is None else args.lora_alpha, args.lora_target, args.lora_sync
    )


def adapters_alone(config: RunConfig) -> Lora | None:
    """The actor's adapters, if the sampler is to get them alone."""
    found = lora(config.actor_train.model_args)
    return found if found is not None and found.sync == "adapter" else None


def objective(config: RunConfig) -> Objective:
    """The fixed part of what is minimised."""
    return Objective(
        loss=LossChoice(config.pg_variant.name, config.pg_variant.config),
        kl_loss_type=config.kl_loss_type,
        ratio_type=config.ratio_type,
        value_clip=config.value_clip,
    )


def train_plan(config: RunConfig, name: str, model: Path) -> TrainPlan:
    """The plan by which a runtime places a training role."""
    role = role_of(config, name)
    choice = _strategy(role, name)
    context = train_context(config, role, name, model)
    return TrainPlan(name, choice.name, config_of(choice), context, context.devices, role.system_envs)


def serve_plan(config: RunConfig, model: Path, chat: Chat | None) -> ServePlan:
    """The plan by which a runtime places the sampling role."""
    role, name = config.actor_infer, "actor_infer"
    choice = _strategy(role, name)
    context = inference_context(config, model, chat)
    return ServePlan(name, choice.name, config_of(choice), context, context.devices, role.system_envs)


def _strategy(role: Role, name: str) -> Choice:
    if role.strategy_args is None:
        raise ConfigError(
            f"$.{name}.strategy_args is missing. Fix: name a strategy, as in strategy_args: {{strategy_name: torch}}."
        )
    return role.strategy_args


def runtime(config: RunConfig, base: Path) -> Runtime:
    """The runtime that places the roles."""
    # Absolute: a process of the runtime may start in another folder, and looks there for the plugins' files.
    context = RuntimeContext(
        timeout=config.runtime_timeout, seed=config.seed, plugins=config.plugins, base=str(base.absolute())
    )
    built: Runtime = build("runtime", config.runtime, context)
    return built


# Any: the configuration as it was written
def loggers(config: RunConfig, plain: Mapping[str, Any]) -> list[tuple[str, Logger]]:
    """The chosen loggers in the YAML's order, with their names."""
    context = logger_context(config, plain)
    return [(choice.name, build("logger", choice, context)) for choice in config.track_with]


# Any: the configuration as it was written
def logger_context(config: RunConfig, plain: Mapping[str, Any]) -> LoggerContext:
    """What every logger is built with; a configuration may go to a service, so it has no secrets."""
    return LoggerContext(
        folder=Path(config.output_dir),
        exp_name=config.exp_name,
        max_steps=config.max_steps,
        config=without_secrets(plain),
    )


def with_seed_files(config: RunConfig, base: Path) -> RunConfig:
    """The configuration with a relative local `pretrain` folder made absolute against the YAML's folder, if it is one
    there."""
    if (
        isinstance(config.pretrain, str)
        and not Path(config.pretrain).is_absolute()
        and (base / config.pretrain).is_dir()
    ):
        return evolve(config, pretrain=str(base / config.pretrain))
    return config


def planned_episodes(manager: EnvManagerConfig) -> dict[str, int]:
    """Episodes per tag of one evaluation."""
    return {
        tag: groups * manager.group_size for tag, groups in zip(manager.tags, manager.num_groups_partition, strict=True)
    }


def role_of(config: RunConfig, name: str) -> Role:
    """A role's block; without one of its own, the reference takes the actor's."""
    role: Role | None = getattr(config, name)
    if role is None and name == "reference":
        return config.actor_train
    if role is None:
        raise ConfigError(f"$.{name} is missing. Fix: add the block with its strategy_args.")
    return role


def devices(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The devices of every role, those that the runtime will give to a role without `device_mapping` included; () for a
    role without any."""
    named = {name: role_of(config, name).device_mapping for name in ("actor_train", "actor_infer", "reference")}
    if config.critic is not None:
        named["critic"] = config.critic.device_mapping
    return placement.effective(
        named, runtime_capabilities(config), visible_gpus(), attached=backend_capabilities(config).attached
    )


def turns(config: RunConfig) -> dict[str, list[int]]:
    """Training role → the GPUs on which it takes turns with the sampler; roles that share none are left out."""
    if not runtime_capabilities(config).gpus:
        return {}
    found = devices(config)
    own = set(found.pop("actor_infer"))
    return {name: sorted(own & set(numbers)) for name, numbers in found.items() if own & set(numbers)}


def is_its_own_reference(config: RunConfig) -> bool:
    """Whether a reference is needed, and is the actor with its adapters off: one of its own would load the same model
    in the same way."""
    actor, reference = config.actor_train, role_of(config, "reference")
    same = all(
        getattr(actor, key) == getattr(reference, key) for key in ("strategy_args", "model_args", "device_mapping")
    )
    return needs_reference(config) and actor.model_args.lora_rank is not None and same


def needs_reference(config: RunConfig) -> bool:
    """Whether a KL coefficient is positive, so that a reference is loaded and run."""
    return config.init_kl_coef > 0 or config.kl_loss_coef > 0


def runtime_capabilities(config: RunConfig) -> RuntimeCapabilities:
    """What the runtime declares; the defaults where it cannot be asked, which is reported where it is named."""
    return declared_if_there(RuntimeCapabilities, config.runtime.name, config.runtime.config)


def backend_capabilities(config: RunConfig) -> BackendCapabilities:
    """What the sampler's backend declares; the defaults where it cannot be asked, which is reported where it is
    named."""
    choice = config.actor_infer.strategy_args
    if choice is None:
        return BackendCapabilities()
    return declared_if_there(BackendCapabilities, choice.name, choice.config)
