"""The schema: one attrs class per block of the YAML. Key names are the field's; docs/configuration.md is generated from
here."""

# ruff: noqa: RUF009 (key and required are attrs fields)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from turnwise.contracts.inference import GeneratingArgs
from turnwise.data.normalise import RewardNormalization
from turnwise.data.ranges import BELOW_ONE, FINITE, NOT_NEGATIVE, PATH, POSITIVE, RANGE, SEED, SHARE, FileName, Range

ROLES = {
    "actor_train": "train_strategy",
    "actor_infer": "inference_backend",
    "reference": "train_strategy",
    "critic": "train_strategy",
}
"""Role → kind of its strategy."""
MANAGERS = ("train_env_manager", "val_env_manager")


# Any: an attrs field, which its class declares with its own type
def key(default: Any, doc: str, within: Range | FileName | None = None) -> Any:
    """A configuration key: its default, its line in the reference, and the range of its values."""
    metadata = {"doc": doc, RANGE: within}
    # Called anew for each configuration: two must not share a block.
    if isinstance(default, type) or callable(default):
        return field(factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


# Any: an attrs field, which its class declares with its own type
def required(doc: str, within: Range | None = None) -> Any:
    """A configuration key without a default."""
    return field(metadata={"doc": doc, RANGE: within})


UNKNOWN = "?"
"""The name of a choice that could not be looked up, which is reported."""


@frozen
class Choice:
    """An implementation by name, with its options. In the YAML: a name, or a mapping with `use:` and the options.

    `config` is the structured config object after the options were checked (None: the implementation has no config
    class)."""

    name: str
    options: Mapping[str, Any] = field(factory=dict)
    config: Any = None


@frozen
class ModelArgs:
    """How a role loads the model."""

    dtype: Literal["bf16", "fp16", "fp32"] = key("bf16", "compute type; master weights and optimizer state are fp32")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = key(
        "sdpa", "attention of the Hugging Face model"
    )
    disable_gradient_checkpointing: bool = key(False, "keep all activations in training (faster, more memory)")
    lora_rank: int | None = key(None, "rank of the LoRA adapters (null: full training)", POSITIVE)
    lora_alpha: int | None = key(None, "scale of the LoRA adapters", POSITIVE)
    lora_target: str | tuple[str, ...] | None = key(None, "modules that get LoRA adapters")
    lora_sync: Literal["merged", "adapter"] = key(
        "merged", "how the sampler gets LoRA weights: merged into the model, or the adapters alone"
    )
    freeze_module_prefix: tuple[str, ...] = key((), "parameters whose names start so are not trained")


@frozen
class TrainingArgs:
    """The optimizer of a role and the size of its updates."""

    learning_rate: float = key(1e-6, "base learning rate, times the schedule's multiplier at each update", NOT_NEGATIVE)
    weight_decay: float = key(0.0, "decoupled weight decay of AdamW", NOT_NEGATIVE)
    warmup_steps: int = key(0, "warm-up, in pipeline steps", NOT_NEGATIVE)
    warmup_ratio: float = key(0.0, "warm-up as a share of max_steps (rounded up); used when warmup_steps is 0", SHARE)
    lr_scheduler_type: str = key("constant", "schedule by its name in transformers; a function of pipeline progress")
    lr_scheduler_kwargs: Mapping[str, Any] = key(dict, "the schedule's own arguments (min_lr, power, …)")
    per_device_train_batch_size: int = key(1, "rows of a micro-batch on one device", POSITIVE)
    gradient_accumulation_steps: int = key(
        1, "micro-batches of an update: U = per device × this × data-parallel size", POSITIVE
    )
    max_grad_norm: float | None = key(
        None, "clipping of the gradient norm for this role (null: the top-level key)", POSITIVE
    )


@frozen
class Role:
    """A model role: actor_train, actor_infer, reference or critic."""

    model_args: ModelArgs = key(ModelArgs, "how the model is loaded")
    training_args: TrainingArgs = key(TrainingArgs, "optimizer and batch sizes")
    generating_args: GeneratingArgs = key(GeneratingArgs, "sampling (actor_infer)")
    strategy_args: Choice | None = key(
        None, "strategy_name and strategy_config: which plugin serves the role, and its options"
    )
    device_mapping: tuple[int, ...] = key(
        (), "devices of the role; empty: one that no role names, else the actor's; without GPUs the CPU"
    )
    infer_batch_size: int = key(
        0,
        "rows of a forward pass without gradients (0: the backend's choice; training roles: the training size)",
        NOT_NEGATIVE,
    )
    use_dynamic_batching_in_train: bool = key(
        False, "micro-batches under max_tokens_per_microbatch_in_train instead of a number of rows"
    )
    use_dynamic_batching_in_infer: bool = key(False, "the same for passes without gradients")
    max_tokens_per_microbatch_in_train: int | None = key(
        None, "tokens of a training micro-batch; packed and not given: sequence_length", POSITIVE
    )
    max_tokens_per_microbatch_in_infer: int | None = key(
        None, "token budget of a micro-batch without gradients; likewise", POSITIVE
    )
    use_sequence_packing: bool = key(False, "several samples in one row, micro-batches under the token budgets")
    system_envs: Mapping[str, str] = key(dict, "environment variables of the role's processes")
    request_timeout: float = key(600.0, "seconds that one response may take (actor_infer)", POSITIVE)
    weight_sync_timeout: float = key(600.0, "seconds that a weight update may take (actor_infer)", POSITIVE)


@frozen
class EnvManagerConfig:
    """How many environments play, for training or evaluation."""

    num_env_groups: int = key(1, "groups of a step", POSITIVE)
    group_size: int = key(1, "members of a group: same task, same seed", POSITIVE)
    tags: tuple[str, ...] = key((), "blocks of custom_envs that are played")
    num_groups_partition: tuple[int, ...] = key((), "groups per tag; empty: an even split")
    max_env_num_per_worker: int | None = key(
        None, "environments alive at once in one worker; the local runtime is one worker", POSITIVE
    )
    step_timeout: float = key(60.0, "seconds that one step of an environment may take", POSITIVE)
    reset_timeout: float = key(60.0, "seconds that one reset may take", POSITIVE)
    max_env_retries: int = key(2, "how often a failed episode is played again", NOT_NEGATIVE)
    max_env_failure_rate: float = key(0.2, "share of failed attempts past which the run stops", BELOW_ONE)
    generating_args: GeneratingArgs | None = key(
        None, "sampling in evaluation (default: greedy); null in training: actor_infer's"
    )


@frozen
class CustomEnv:
    """An environment under a tag of its own."""

    env_type: str = required("environment by name")
    env_config: Mapping[str, Any] = key(dict, "the environment's own options")
    env_manager: Choice = key(
        lambda: Choice("trajectory"), "environment manager: trajectory or stepwise, with its options"
    )
    samplers: Mapping[str, Choice] = key(
        dict, "further models of an episode, by the names that its manager asks for: players, as {opponent: random}"
    )
    max_steps: int = key(10, "turns of an episode", POSITIVE)
    max_tokens_per_step: int | None = key(None, "tokens that one turn may generate (null: max_new_tokens)", POSITIVE)
    step: Literal["inline", "thread", "process"] = key("thread", "where the environment's step runs")
    max_env_step_concurrent: int | None = key(None, "steps of this tag at once", POSITIVE)


@frozen
class CoefRange:
    """A coefficient that moves linearly from `start` at the first step to `end` at max_steps."""

    start: float = required("at the first step", FINITE)
    end: float = required("at max_steps", FINITE)

    def at(self, progress: float) -> float:
        """The value at `progress` = p / max_steps."""
        return self.start + (self.end - self.start) * progress


@frozen
class ImportanceWeight:
    """A factor of the policy loss: the ratio of trainer to sampler, within bounds."""

    enabled: bool = key(False, "multiply the policy loss of each token with the ratio")
    weight_type: Literal["token", "segment", "geometric", "sequence"] = key(
        "token",
        "e^d of the token, e^mean of the turn, e^mean or e^sum of the trajectory; d = trainer's − sampler's log-prob",
    )
    lower_bound: float | None = key(0.0, "the least weight (null: 0)")
    upper_bound: float | None = key(1.2, "the largest weight (null: none)")


@frozen
class CorrectionFilter:
    """Tokens whose ratio of trainer to sampler, or difference of probabilities, lies outside the bounds do not
    train."""

    enabled: bool = key(True, "false: the filter is left out")
    agg_type: Literal["token", "segment", "geometric", "sequence"] = key(
        "token", "level of ratio and difference, as in weight_type"
    )
    ratio_enabled: bool = key(False, "filter by the ratio")
    ratio_low: float = key(0.8, "the least ratio that trains")
    ratio_high: float = key(1.2, "the largest ratio that trains")
    diff_enabled: bool = key(
        False, "filter by the difference of the tokens' probabilities, trainer's − sampler's, aggregated at the level"
    )
    diff_low: float = key(-0.2, "the least difference that trains")
    diff_high: float = key(0.2, "the largest difference that trains")

    @property
    def active(self) -> bool:
        """Whether it can drop a token."""
        return self.enabled and (self.ratio_enabled or self.diff_enabled)


@frozen
class TrainInferCorrection:
    """Correction of the difference between the trainer's log-probs and the sampler's."""

    is_weight: ImportanceWeight = key(ImportanceWeight, "a factor of the policy loss")
    filters: tuple[CorrectionFilter, ...] = key((), "which tokens train; a token must pass all")

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return self.is_weight.enabled or any(one.active for one in self.filters)


@frozen
class RolloutMock:
    """Dump the rollouts of a run, or train again from a dump."""

    enable: bool = key(False, "switch it on")
    mode: Literal["dump", "mock"] = key("dump", "dump: write the rollouts of this run; mock: train from them")
    dump_dir: str | None = key(None, "folder of the dump", PATH)


@frozen
class RunConfig:
    """A whole run."""

    max_steps: int = required("pipeline steps: rollout, training, weight update", POSITIVE)
    rollout_batch_size: int = required("trajectories of a step = num_env_groups × group_size", POSITIVE)
    pretrain: str | Mapping[str, Any] = required("model: a folder, a hub id, or a recipe for a tiny local model")
    train_env_manager: EnvManagerConfig = required("the training environments")
    custom_envs: Mapping[str, CustomEnv] = required("environments by tag")
    actor_train: Role = key(Role, "the trained policy")
    actor_infer: Role = key(Role, "the sampling policy")
    reference: Role | None = key(None, "the frozen reference; loaded only when a KL coefficient is positive")
    critic: Role | None = key(None, "the value model; loaded only when the estimator needs values")
    val_env_manager: EnvManagerConfig | None = key(None, "the evaluation environments")
    exp_name: str = key("turnwise", "name of the run")
    seed: int = key(42, "seed of everything in training", SEED)
    val_seed: int = key(0, "seed of the evaluation tasks: the same ones every time", SEED)
    output_dir: str = key("runs/${exp_name}", "checkpoints, metrics, report", PATH)
    logging_dir: str | None = key(None, "folder of the log file; null: output_dir", PATH)
    render_save_dir: str | None = key(None, "folder for GIFs of evaluated episodes; null: none", PATH)
    render_episodes: int = key(2, "evaluated episodes per tag that are rendered", NOT_NEGATIVE)
    rollout_dump_dir: str | None = key(None, "folder for the trajectories of every step; null: none", PATH)
    num_gpus_per_node: int | None = key(
        None,
        "GPUs that the run expects; `check` compares it with those found, where devices are this machine's GPUs",
        POSITIVE,
    )
    plugins: tuple[str, ...] = key(
        (), "what the run needs: requirement strings, modules, .py files; no:NAME blocks a plugin"
    )
    vars: Mapping[str, Any] = key(dict, "free values for interpolation")
    runtime: Choice = key(lambda: Choice("local"), "where the roles live")
    runtime_timeout: float = key(3600.0, "seconds that one call to a role may take", POSITIVE)
    model_source: Choice = key(lambda: Choice("hf"), "what turns pretrain into a model folder")
    trust_remote_code: bool = key(
        False, "run the Python code that the folder of pretrain brings; only where its authors are trusted"
    )
    save_steps: int = key(0, "a checkpoint every so many steps (0: only the final one)", NOT_NEGATIVE)
    logging_steps: int = key(1, "metrics are logged every so many steps", POSITIVE)
    eval_steps: int | None = key(
        None, "an evaluation before every so many steps (0 or null: none at all)", NOT_NEGATIVE
    )
    eval_at_end: bool = key(True, "one more evaluation after the last step")
    baselines: tuple[Choice, ...] = key(
        (), "inference backends (players) that play the evaluation tasks once, for comparison"
    )
    resume_from_checkpoint: bool | str = key(
        False, "false, true (the newest checkpoint of output_dir), or a checkpoint folder"
    )
    max_ckpt_to_keep: int | None = key(None, "older checkpoints are deleted (null: all are kept)", POSITIVE)
    val_batch_size: int | None = key(None, "trajectories of an evaluation = its num_env_groups × group_size", POSITIVE)
    sequence_length: int = key(2048, "tokens of the longest sample", POSITIVE)
    async_generation_ratio: int = key(
        0,
        "batches generated ahead of the trainer; no token trains at a greater staleness (0: synchronous)",
        NOT_NEGATIVE,
    )
    weight_update: Literal["between_batches", "between_turns", "between_tokens"] = key(
        "between_batches", "when new weights reach what plays ahead; between_batches repeats bit for bit"
    )
    stall_timeout: float = key(
        900.0,
        "seconds in which no episode moves before the run ends and says what waits for what; above the calls' timeouts",
        POSITIVE,
    )
    adv_estimator: Choice = key(lambda: Choice("grpo"), "advantage estimator")
    gamma: float = key(1.0, "discount per token (and of the KL penalty in the reward)", SHARE)
    lambd: float = key(0.95, "λ of GAE", SHARE)
    whiten_advantages: bool | None = key(
        None, "whiten over all sampled tokens of the step (null: the estimator's default)"
    )
    advantage_clip: float | None = key(
        None, "advantages are clamped to ±this (not the ratio's clip, an option of the loss)", POSITIVE
    )
    reward_normalization: RewardNormalization | None = key(
        None, "how scores are normalised (null: the estimator's default)"
    )
    reward_clip: float | None = key(
        None, "rewards of a turn are clamped to ±this before anything is computed from them", POSITIVE
    )
    group_filters: tuple[Choice, ...] = key((), "group filters, applied in order")
    pg_variant: Choice = key(lambda: Choice("ppo"), "policy loss")
    ratio_type: Literal["token", "segment"] = key("token", "level of the importance ratio")
    ppo_epochs: int = key(1, "passes over the step's rows", POSITIVE)
    entropy_loss_coef: float | CoefRange = key(0.0, "entropy bonus: a number or {start, end}", FINITE)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = key(
        "token-mean", "how per-token losses become one number"
    )
    loss_agg_unit: Literal["trajectory", "sample"] = key(
        "trajectory", "what a sequence is: all rows of a trajectory, or one row"
    )
    loss_scale_factor: float | None = key(None, "C of seq-mean-token-sum-norm (null: sequence_length)", POSITIVE)
    init_kl_coef: float = key(0.0, "β of the KL penalty in the reward; positive switches it on", NOT_NEGATIVE)
    kl_penalty: Literal["k1", "abs", "k2", "k3"] = key("k1", "KL estimator in the reward")
    kl_in_score: bool = key(False, "subtract the penalty from the score before it is normalised (verl)")
    target_kl: float | None = key(None, "adaptive β: move toward this KL (null: fixed)", POSITIVE)
    kl_horizon: float = key(10000.0, "horizon of the adaptive β, in trajectories", POSITIVE)
    kl_loss_coef: float = key(0.0, "coefficient of the KL term in the loss; positive switches it on", NOT_NEGATIVE)
    kl_loss_type: Literal["k1", "abs", "k2", "k3"] = key("k3", "KL estimator in the loss")
    add_token_level_kl: bool | None = key(None, "may be given; must agree with init_kl_coef")
    use_kl_loss: bool | None = key(None, "may be given; must agree with kl_loss_coef")
    value_clip: float | None = key(None, "clipping of the value loss (null: none)", POSITIVE)
    recompute_old_logprobs: Literal["auto", "true", "false"] = key("auto", "where old log-probs come from")
    train_infer_correction: TrainInferCorrection | None = key(
        None, "correction of the difference between trainer and sampler"
    )
    batch_adjust_mode: Choice = key(lambda: Choice("by_trajectory"), "how the rows of a step become updates")
    rollout_mock: RolloutMock = key(RolloutMock, "dump rollouts, or train from a dump")
    max_grad_norm: float = key(1.0, "clipping of the gradient norm", POSITIVE)
    max_skipped_updates: int = key(
        5, "updates in a row whose loss or gradient is not finite before the run ends; each makes no step", NOT_NEGATIVE
    )
    model_update_buffer_size_mb: int = key(1024, "bucket size when weights are streamed to the backend", POSITIVE)
    track_with: tuple[Choice, ...] = key(lambda: (Choice("console"), Choice("jsonl")), "loggers")
    algorithm: Mapping[str, Any] = key(
        dict, "top-level keys that belong to the chosen implementations (filled by the loader)"
    )
