"""Configurations of whole runs for tests: on the fakes alone, and on a tiny FrozenLake with hf and torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from turnwise.config.schema import EnvManagerConfig, RunConfig

UNTIMED = ("time/", "tps/", "system/", "async/groups/", "resume/")
"""What time decides of the metrics: two equal runs differ in these."""

FAKES: Mapping[str, Any] = {
    "exp_name": "fakes",
    "plugins": ["turnwise.testing.plugin"],
    "seed": 1,
    "output_dir": "out",
    "max_steps": 3,
    "eval_steps": 2,
    "rollout_batch_size": 4,
    "sequence_length": 64,
    "model_source": "fake",
    "pretrain": "fake",
    "adv_estimator": "fake",
    "pg_variant": "fake",
    "batch_adjust_mode": "fake",
    "track_with": ["fake"],
    "actor_train": {
        "training_args": {"learning_rate": 5.0, "per_device_train_batch_size": 2},
        "strategy_args": {"strategy_name": "fake"},
    },
    "actor_infer": {"generating_args": {"max_new_tokens": 4}, "strategy_args": {"strategy_name": "fake"}},
    "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Toy"]},
    "val_env_manager": {"num_env_groups": 3, "group_size": 1, "tags": ["Toy"]},
    "custom_envs": {"Toy": {"env_type": "fake", "env_manager": "fake", "max_steps": 3, "step": "inline"}},
}
"""Seconds long, without torch: what the loop, the CLI and a runtime do with any plugin."""

COUNTING: Mapping[str, Any] = {
    "max_steps": 6,
    "rollout_batch_size": 8,
    "sequence_length": 128,
    "runtime": "local",
    "model_source": "fake_source",
    "adv_estimator": "fake_estimator",
    "pg_variant": "fake_loss",
    "batch_adjust_mode": "fake_adjust",
    "actor_train.training_args.per_device_train_batch_size": 4,
    "actor_train.strategy_args.strategy_name": "fake_strategy",
    "actor_infer.generating_args.temperature": 1.0,
    "actor_infer.strategy_args.strategy_name": "fake_backend",
    "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["Count"]},
    "val_env_manager": {"num_env_groups": 4, "group_size": 1, "tags": ["Count"]},
    "custom_envs": {"Count": {"env_type": "fake_env", "env_manager": "fake_manager", "max_steps": 3, "step": "inline"}},
    "track_with": [{"use": "jsonl", "every": 1}],
}
"""Changes of FAKES for runs that are killed, interrupted and compared: two groups of four, two updates a step, metrics and
trajectories in files."""

LAKE: Mapping[str, Any] = {
    "exp_name": "lake",
    "plugins": [
        *("turnwise-gymnasium", "turnwise-managers", "turnwise-hf", "turnwise-torch"),
        *("turnwise-grpo", "turnwise-losses", "turnwise-batching"),
    ],
    "seed": 1,
    "output_dir": "out",
    "max_steps": 2,
    "save_steps": 1,
    "rollout_batch_size": 8,
    "sequence_length": 256,
    "pretrain": {
        "recipe": {"architecture": "qwen2", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "tokenizer": "word"}
    },
    "adv_estimator": "grpo",
    "actor_train": {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "training_args": {"learning_rate": 1.0e-2, "per_device_train_batch_size": 4},
        "strategy_args": {"strategy_name": "torch"},
    },
    "actor_infer": {
        "model_args": {"dtype": "fp32"},
        "generating_args": {"max_new_tokens": 2, "temperature": 1.0},
        "strategy_args": {"strategy_name": "hf"},
    },
    "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["Lake"]},
    "custom_envs": {
        "Lake": {
            "env_type": "frozen_lake",
            "env_manager": {"use": "stepwise", "history_length": 1},
            "max_steps": 4,
            "step": "inline",
            "env_config": {
                "random_start_goal": True,
                "observation": "relative",
                "hole_penalty": -0.5,
                "invalid_penalty": -0.3,
            },
        }
    },
    "track_with": [{"use": "jsonl", "every": 1}],
}
"""A language model of one layer on FrozenLake: what two engines make of the same run."""


def written(base: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> str:
    """`base` as YAML, with the keys of `changes` (dotted paths) set, or left out where the value is None."""
    # Deep, for the bases are shared by all tests and their blocks are changed in place.
    keys: dict[str, Any] = copy.deepcopy(dict(base))
    for path, value in (changes or {}).items():
        *above, last = path.split(".")
        place = keys
        for name in above:
            place = place.setdefault(name, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return yaml.safe_dump(keys, sort_keys=False)


def one_step(**options: Any) -> RunConfig:
    """The configuration of one step without environments, for tests of what reads `options` alone."""
    needed = {"max_steps": 1, "rollout_batch_size": 4, "pretrain": "fake", "custom_envs": {}}
    return RunConfig(**{**needed, "train_env_manager": EnvManagerConfig(), **options})
