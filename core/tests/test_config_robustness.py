"""Whatever stands in a file, the answer is a configuration or a report: never another exception."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.config import load
from turnwise.config.loader import Loaded
from turnwise.errors import ConfigError
from turnwise.plugins import Registry

KEYS = [
    "max_steps", "rollout_batch_size", "pretrain", "adv_estimator", "pg_variant",
    "actor_train", "actor_train.training_args", "actor_train.strategy_args",
    "actor_train.strategy_args.strategy_config", "actor_train.device_mapping", "actor_train.model_args", "actor_train.system_envs", "actor_infer",
    "actor_infer.generating_args", "actor_infer.generating_args.num_return_sequences", "actor_infer.generating_args.do_sample", "reference", "critic",
    "train_env_manager", "train_env_manager.tags", "train_env_manager.num_env_groups", "train_env_manager.group_size",
    "train_env_manager.format_penalty",
    "train_env_manager.num_groups_partition", "train_env_manager.generating_args", "val_env_manager", "val_env_manager.generating_args",
    "custom_envs", "custom_envs.Lake", "custom_envs.Lake.env_config", "custom_envs.Lake.env_config.max_steps", "custom_envs.Lake.env_manager",
    "custom_envs.Lake.env_manager_cls", "custom_envs.Lake.history_length", "track_with", "tracker_kwargs", "group_filters", "baselines", "vars",
    "plugins", "defaults", "checkpoint_config", "system_envs", "prompt_length", "response_length", "num_return_sequences_in_group", "rollout_mock",
    "train_infer_correction", "reward_normalization", "pg_clip", "gamma", "entropy_loss_coef", "max_actions_per_traj", "hydra", "runtime", "anything",
]  # fmt: skip
LEAVES = st.sampled_from(
    [
        None,
        True,
        0,
        1,
        -1,
        8,
        2.5,
        "",
        "x",
        "Lake",
        "grpo",
        "${exp_name}",
        "${max_steps}",
        "${nope}",
        "???",
        "list(range(0,2))",
    ]
)
NAMES = st.sampled_from(["use", "Lake", "a", "stage"])
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2))
BAD = [
    "=1",
    "a.=1",
    ".a=1",
    "a..b=1",
    "[0]=1",
    "a[=1",
    "max_steps=${",
    "max_steps={",
    "seed=!!x 1",
    "custom_envs=[]",
    "${a}=1",
    "track_with.²=x",
    "exp_name=${vars.²}",
]


@settings(max_examples=150)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_value_anywhere_is_accepted_or_reported(
    base_yaml: str, tmp_path: Path, fake_registry: Registry, changes: dict[str, Any]
) -> None:
    data = yaml.safe_load(base_yaml)
    for key, value in changes.items():
        *blocks, last = key.split(".")
        holder = data
        for block in blocks:
            holder = holder.setdefault(block, {}) if isinstance(holder, dict) else {}
        if isinstance(holder, dict):
            holder[last] = value
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    told: list[str] = []
    try:
        load(tmp_path / "run.yaml", registry=fake_registry)
    except ConfigError as error:
        told = error.problems or [""]
    assert all(line.strip() and "\n" not in line for line in told)


@pytest.mark.parametrize("override", BAD)
def test_any_override_is_accepted_or_reported(
    base_yaml: str, tmp_path: Path, fake_registry: Registry, override: str
) -> None:
    (tmp_path / "run.yaml").write_text(base_yaml)
    with pytest.raises(ConfigError):
        load(tmp_path / "run.yaml", [override], registry=fake_registry)


def test_a_digit_that_is_no_decimal_is_a_name(run_yaml: Callable[..., Loaded]) -> None:
    loaded = run_yaml("vars: {²: two}\n", "exp_name=${vars.²}")
    assert loaded.config.exp_name == "two"
    assert loaded.sources.placed("$.vars.²: odd").endswith(": $.vars.²: odd")
