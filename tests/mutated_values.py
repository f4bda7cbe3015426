"""The configuration that is mutated, and the values that are put into it."""

from __future__ import annotations

from typing import Any

BASE = """\
exp_name: fakes
plugins: [turnwise.testing.plugin]
seed: 1
output_dir: out
max_steps: 6
eval_steps: 3
save_steps: 2
rollout_batch_size: 8
val_batch_size: 4
sequence_length: 128
vars: {width: 4, names: {a: 1}}
runtime: local
model_source: fake_source
pretrain: fake
adv_estimator: grpo
pg_variant: {use: ppo, pg_clip: 0.2}
gamma: 1.0
entropy_loss_coef: {start: 0.01, end: 0.0}
kl_loss_coef: 0.01
batch_adjust_mode: fake_adjust
reward_normalization: {grouping: traj_group_id, method: mean_std}
train_infer_correction:
  is_weight: {enabled: true, weight_type: token, upper_bound: 1.5}
  filters:
  - {agg_type: token, ratio_enabled: true, ratio_low: 0.5, ratio_high: 2.0}
actor_train:
  model_args: {dtype: fp32, disable_gradient_checkpointing: true}
  training_args: {learning_rate: 5.0, weight_decay: 0.0, warmup_steps: 1, per_device_train_batch_size: 4, max_grad_norm: 1.0}
  strategy_args: {strategy_name: fake_strategy}
  system_envs: {SOME_VARIABLE: text}
actor_infer:
  generating_args: {max_new_tokens: 4, temperature: 1.0, top_p: 0.9, top_k: 10}
  strategy_args: {strategy_name: fake_backend}
  request_timeout: 60
train_env_manager: {num_env_groups: 2, group_size: 4, tags: [Count], max_env_retries: 1, max_env_failure_rate: 0.5}
val_env_manager: {num_env_groups: 4, group_size: 1, tags: [Count], generating_args: {temperature: 0}}
custom_envs:
  Count: {env_type: fake_env, env_manager: fake_manager, max_steps: 3, step: inline, env_config: {length: 3}}
track_with: [{use: jsonl, every: 1}]
"""

NUMBERS = {
    ("max_steps",),
    ("rollout_batch_size",),
    ("sequence_length",),
    ("seed",),
    ("eval_steps",),
    ("save_steps",),
    ("kl_loss_coef",),
    ("gamma",),
    ("actor_train", "training_args", "learning_rate"),
    ("actor_train", "training_args", "per_device_train_batch_size"),
    ("actor_infer", "generating_args", "max_new_tokens"),
    ("actor_infer", "generating_args", "temperature"),
    ("actor_infer", "generating_args", "top_p"),
    ("train_env_manager", "num_env_groups"),
    ("train_env_manager", "group_size"),
    ("val_env_manager", "num_env_groups"),
    ("custom_envs", "Count", "max_steps"),
    ("train_env_manager", "max_env_failure_rate"),
}
"""Paths whose values are numbers that are not negative."""
BLOCKS = (
    "actor_train",
    "actor_infer",
    "train_env_manager",
    "custom_envs",
    "reward_normalization",
    "train_infer_correction",
)
NO_NUMBER: tuple[Any, ...] = ("many", [1], {"a": 1}, [[]], True, "1e", "0x", "", "8 ")
OUT_OF_RANGE = (-1, -0.5, float("nan"), float("inf"), -float("inf"), -(10**400))
UNRESOLVED = (
    "${nope}",
    "${nope.x}",
    "${vars.names.${exp_name}}",
    "${",
    "${vars.}",
    "${oc.env:NO_SUCH_VARIABLE_HERE}",
    "???",
    "${hydra:run}",
    "${}",
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**18, 1e-320, 0.1, float("inf"), float("nan"), "", " ", "x",
    "a" * 5000, "é€😀", "\ud800", "0o17", "1_000", "1:30", "~", "null", "=", "<<", "a/../../b", "/proc/self/mem",
    "/dev/null", "~/x", "C:\\x", "${exp_name}", "${max_steps}", "${vars}", "${actor_train}", "\\${x}", "%s%n", "{}",
    "{0}", "grpo", "none", "list(range(0,4))", "list(range(0,99999999))", [], {}, [None], [[]], {"use": None},
    {"use": "grpo"}, {"use": ["x"]}, {1: 2}, {"": 1}, [0] * 500, {"a": {"b": {"c": {}}}}, "line\nline", "\t", "\x07",
    "a\u2028b", "Count", ["Count", "Count"], "fake", {"strategy_name": "fake_strategy", "strategy_config": [1]},
)  # fmt: skip
