"""Files and the values in them, and the lines that the report names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from yaml_runs import Run, problems

from turnwise.config import load
from turnwise.config.source.yaml_file import parse_value
from turnwise.errors import ConfigError
from turnwise.plugins import Registry


def test_a_small_file_becomes_a_run_with_defaults(run_yaml: Run) -> None:
    loaded = run_yaml()
    config = loaded.config
    assert (config.max_steps, config.rollout_batch_size, config.gamma, config.output_dir) == (
        10,
        16,
        1.0,
        "runs/turnwise",
    )
    assert config.train_env_manager.num_groups_partition == (4,)
    assert config.actor_train.strategy_args is not None
    assert config.actor_train.strategy_args.config.stage == 2
    assert loaded.notes == []
    assert loaded.warnings == []


def test_output_dir_follows_the_name_of_the_run(run_yaml: Run) -> None:
    assert run_yaml("exp_name: lake\n").config.output_dir == "runs/lake"


def test_every_mistake_is_told_at_once_with_its_line(run_yaml: Run) -> None:
    text = """\
max_steps: "8"
rollout_batch_size: true
pretrain: m
gama: 0.9
adv_estimator: gppo
actor_train:
  training_args:
    learning_rate: fast
    warmup_step: 3
  strategy_args: {strategy_name: trainer, strategy_config: {stag: 2}}
actor_infer:
  strategy_args: {strategy_name: sampler}
train_env_manager: {num_env_groups: 4.0, group_size: 4}
custom_envs:
  Lake: {env_type: lake, env_config: {siez: 4}, step: thred}
eval_steps:
loss_agg_mode: token_mean
save_steps: ~
"""
    assert problems(run_yaml, text, "ppo_epochs=two", base=False) == [
        (
            "override 'ppo_epochs=two': $.ppo_epochs: 'two' is text, a whole number is needed. "
            "Fix: write it without quotes (from the environment: ${oc.decode:${oc.env:NAME}})"
        ),
        (
            "run.yaml:1: $.max_steps: '8' is text, a whole number is needed. "
            "Fix: write it without quotes (from the environment: ${oc.decode:${oc.env:NAME}})"
        ),
        "run.yaml:2: $.rollout_batch_size: True is true or false, a whole number is needed. Fix: write a whole number",
        "run.yaml:4: $.gama: unknown key 'gama'. Did you mean 'gamma'? Fix: correct or remove it",
        (
            "run.yaml:5: $.adv_estimator: no advantage estimator is named 'gppo'. Did you mean 'grpo'? Installed: gae,"
            " gigpo, grpo, step. Fix: correct the name, or install a plugin that provides it and name it under"
            " plugins:."
        ),
        (
            "run.yaml:8: $.actor_train.training_args.learning_rate: 'fast' is text, a number is needed. "
            "Fix: write it without quotes (from the environment: ${oc.decode:${oc.env:NAME}})"
        ),
        (
            "run.yaml:9: $.actor_train.training_args.warmup_step: unknown key 'warmup_step'. Did you mean"
            " 'warmup_steps'? Known: gradient_accumulation_steps, learning_rate, lr_scheduler_kwargs,"
            " lr_scheduler_type, max_grad_norm, per_device_train_batch_size, warmup_ratio, warmup_steps, weight_decay."
            " Fix: correct or remove it"
        ),
        (
            "run.yaml:10: $.actor_train.strategy_args.strategy_config.stag: unknown key 'stag'. Did you mean 'stage'? "
            "Known: betas, pipeline_model_parallel_size, stage, tensor_model_parallel_size. Fix: correct or remove it"
        ),
        (
            "run.yaml:13: $.train_env_manager.num_env_groups: 4.0 is a number, a whole number is needed. Fix: write a"
            " whole number"
        ),
        (
            "run.yaml:15: $.custom_envs.Lake.env_config.siez: environment 'lake' has no option 'siez'. Did you mean"
            " 'size'? Its options: is_slippery, size. Fix: correct or remove it."
        ),
        (
            "run.yaml:15: $.custom_envs.Lake.step: 'thred' is none of 'inline', 'thread', 'process'. Did you mean"
            " 'thread'? Fix: choose one of them"
        ),
        (
            "run.yaml:17: $.loss_agg_mode: 'token_mean' is none of 'token-mean', 'seq-mean-token-mean',"
            " 'seq-mean-token-sum', 'seq-mean-token-sum-norm'. Did you mean 'token-mean'? Fix: choose one of them"
        ),
        (
            "run.yaml:18: $.save_steps: None is empty (null), a whole number is needed. Fix: write a value, or remove"
            " the key for its default"
        ),
    ]


def test_a_required_key_that_is_missing_is_named(run_yaml: Run) -> None:
    found = problems(run_yaml, "max_steps: 3\n", base=False)
    assert "run.yaml: $.rollout_batch_size: this key is required. Fix: write it" in found
    assert any(
        "$.actor_train: actor_train.strategy_args says what runs it. Installed: trainer." in line for line in found
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: the file is empty"),
        ("# nothing\n", "run.yaml: the file is empty"),
        ("- a\n- b\n", "run.yaml: a mapping of keys is needed, not a list"),
        ("just text\n", "run.yaml: a mapping of keys is needed, not a str ('just text')"),
        ("a: 1\nb:\n\tc: 2\n", "run.yaml:3: a tab is used for indentation. Fix: indent with spaces"),
        ("a: [1, 2\nb: 3\n", "run.yaml:2: not valid YAML"),
        ("a: 1\nb: {c: 1, d: 2,\n  c: 3}\na: 2\n", "run.yaml:4: the key 'a' stands here and in line 1. Fix: keep one"),
        ("a: &x\n  b: *x\n", "run.yaml:1: an anchor refers to itself"),
        (
            "a: 1\nb: x\0y\n",
            "run.yaml:2: not valid YAML: the character '\\x00' is not allowed. Fix: save the file as UTF-8 text",
        ),
        (f"a: 1\nb: {'9' * 5000}\n", "run.yaml:2: the number has more than 300 digits. Fix: write a smaller one"),
        (
            "a: !!python/object:os.system {}\n",
            "run.yaml:1: the tag 'tag:yaml.org,2002:python/object:os.system' is not known. Fix: remove it",
        ),
        ("? [1, 2]\n: 3\n", "run.yaml:1: not valid YAML: a key must be text"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_clear_line(run_yaml: Run, text: str, expected: str) -> None:
    found = problems(run_yaml, text, base=False)
    assert any(line.startswith(expected) for line in found), found


def test_every_duplicate_key_is_told(run_yaml: Run) -> None:
    assert len(problems(run_yaml, "a: 1\na: 2\nb: {c: 1, c: 2}\n", base=False)) == 2


def test_a_file_that_is_not_there_names_its_neighbours(run_yaml: Run, fake_registry: Registry) -> None:
    run_yaml()
    with pytest.raises(
        ConfigError, match=r"^rum\.yaml: there is no such file\. Beside it: run\.yaml\. Fix: correct the path$"
    ):
        load("rum.yaml", registry=fake_registry)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Path.cwd(), registry=fake_registry)
    Path("latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load("latin.yaml", registry=fake_registry)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1.0e6", 1e6), ("-2E+3", -2e3), (".5", 0.5), ("5.", 5.0), ("1_000", 1000), ("0x10", 16), ("010", "010"), ("1:30", "1:30"),
     ("2024-01-02", "2024-01-02"), ("'8'", "8"), ("", None), ("null", None), ("~", None), ("true", True), ("[1, a]", [1, "a"]), ("e5", "e5"),
     (".inf", float("inf"))],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@given(st.floats(allow_nan=False))
def test_every_float_that_python_prints_is_a_number(value: float) -> None:
    text = repr(value).replace("inf", ".inf")
    assert parse_value(text) == value


_LEAVES = st.none() | st.booleans() | st.integers() | st.text(alphabet="abc ", max_size=5)
_KEYS = st.text(alphabet="xyz", min_size=1, max_size=3)


@given(st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3)))
def test_yaml_data_is_read_as_yaml_reads_it(data: object) -> None:
    assert parse_value(yaml.safe_dump(data)) == data


def test_merge_keys_and_anchors_work_and_are_no_duplicates(run_yaml: Run, base_yaml: str) -> None:
    text = "  Pond: &pond {<<: *lake, max_steps: 3}\n  Third: *pond\n"
    config = run_yaml(base_yaml.replace("Lake: {env_type", "Lake: &lake {env_type") + text, base=False).config
    assert config.custom_envs["Pond"].env_config == {"size": 4}
    assert config.custom_envs["Third"].max_steps == 3
