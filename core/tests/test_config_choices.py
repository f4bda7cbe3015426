"""Implementations by name, their options, and the algorithm keys that reach them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.config import Choice, Loaded
from turnwise.errors import ConfigError, PluginError

Run = Callable[..., Loaded]


def problems(run: Run, text: str = "", *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        run(text, *overrides)
    return caught.value.problems


def test_a_name_and_a_mapping_with_use_are_the_same(run_yaml: Run) -> None:
    assert run_yaml("", "adv_estimator=gigpo").config == run_yaml("", "adv_estimator={use: gigpo}").config
    config = run_yaml("", "adv_estimator={use: gigpo, step_reward_weight: 0.5}").config
    assert config.adv_estimator.config.step_reward_weight == 0.5


def test_an_alias_gives_the_implementation_under_its_name(run_yaml: Run) -> None:
    strategy = run_yaml("", "actor_train.strategy_args.strategy_name=trainer_train").config.actor_train.strategy_args
    assert strategy is not None
    assert strategy.name == "trainer"


def test_lists_keep_the_order_of_the_yaml_and_a_single_name_is_a_list_of_one(run_yaml: Run) -> None:
    config = run_yaml(
        "track_with: [jsonl, {use: wall, height: 2}, console]\ngroup_filters: no_signal\nbaselines: [random]\n"
    ).config
    assert [c.name for c in config.track_with] == ["jsonl", "wall", "console"]
    assert config.track_with[1] == Choice("wall", {"height": 2})
    assert config.group_filters == (Choice("no_signal"),)
    assert config.baselines == (Choice("random"),)


def test_options_that_the_strategy_does_not_know_are_its_engines(run_yaml: Run) -> None:
    strategy = run_yaml(
        "", "actor_infer.strategy_args.strategy_config={gpu_memory_utilization: 0.5, block_size: 16}"
    ).config.actor_infer.strategy_args
    assert strategy is not None
    assert strategy.config.gpu_memory_utilization == 0.5
    assert strategy.config.engine_args == {"block_size": 16}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["track_with=[{use: wall, hight: 2}]"], "$.track_with[0].hight: logger 'wall' has no option 'hight'. Did you mean 'height'?"),
        (["track_with={use: jsonl, every: x}"], "$.track_with.every: 'x' is text, a whole number is needed"),
        (["track_with=3"], "$.track_with: 3 is neither a name nor a list of names"),
        (["track_with=[3]"], "$.track_with[0]: 3 names no implementation"),
        (["track_with=[torn]"], "logger 'torn' (from made-for-tests) cannot be loaded from 'a_module_that_is_not_there:Config': ModuleNotFoundError"),
        (["adv_estimator={step_reward_weight: 1}"], "$.adv_estimator: `use:` must name the implementation, it is None. Fix: use: NAME"),
        (["pg_variant={use: ppo, pg_clip: 0}"], "$.pg_variant.pg_clip: 'pg_clip' must be > 0: 0"),
        (["actor_train.strategy_args.strategy_name=deepspeed"], "$.actor_train.strategy_args.strategy_name: no train strategy is named 'deepspeed'"),
        (["actor_train.strategy_args.strategy_confg={}"], "$.actor_train.strategy_args.strategy_confg: unknown key 'strategy_confg'. Did you mean"),
        (["actor_train.strategy_args.strategy_config=3"], "$.actor_train.strategy_args.strategy_config: 3 is not a mapping of options"),
        (["actor_train.strategy_args.strategy_config={betas: [1]}"], ".strategy_config.betas: [1] is a list, a list of 2 is needed"),
        (["actor_train.strategy_args=null"], "$.actor_train: actor_train.strategy_args says what runs it. Installed: trainer."),
        (["custom_envs.Lake.env_type=lakes"], "$.custom_envs.Lake.env_type: no environment is named 'lakes'. Did you mean 'lake'?"),
        (["custom_envs.Lake.env_manager=step"], "no env manager is named 'step'. Did you mean 'stepwise'?"),
        (["plugins=[turnwise-nowhere, turnwise-elsewhere>=2]"],
         "$.plugins: 'turnwise-nowhere' is not installed; 'turnwise-elsewhere' is not installed. "
         "Fix: pip install --find-links dist 'turnwise-nowhere' 'turnwise-elsewhere>=2'"),
        (["plugins=[./not_there.py]"], "$.plugins: the file './not_there.py' does not exist"),
        (["algorithm={pg_clip: 1}"], "$.algorithm: unknown key 'algorithm'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_choice_is_told_with_its_path(run_yaml: Run, overrides: list[str], expected: str) -> None:
    found = problems(run_yaml, "", *overrides)
    assert any(expected in line for line in found), found
    assert len(found) == 1, found


def test_plugin_and_key_mistakes_stand_in_one_report_with_the_cause_chained(run_yaml: Run) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("plugins: [turnwise-nowhere]\nsede: 1\n", "pg_variant=pppo")
    assert len(caught.value.problems) == 3
    assert isinstance(caught.value.__cause__, PluginError)


def test_a_file_under_plugins_is_found_beside_the_yaml(run_yaml: Run) -> None:
    Path("my_env.py").write_text(
        "import turnwise\n\nclass Mine:\n    def __init__(self, depth: int = 1): pass\n\n"
        "@turnwise.hookimpl\ndef environments():\n    return [turnwise.Implementation('mine', Mine)]\n"
    )
    text = "  Mine: {env_type: mine, env_config: {depth: 2}}\nplugins: [./my_env.py]\n"
    assert run_yaml(text, "train_env_manager.tags=[Mine]").config.custom_envs["Mine"].env_config == {"depth": 2}
    assert problems(run_yaml, text.replace("depth", "height"), "train_env_manager.tags=[Mine]") == [
        "run.yaml:16: $.custom_envs.Mine.env_config.height: environment 'mine' has no option 'height'. Its options:"
        " depth. Fix: correct or remove it."
    ]


TYPED = """
from __future__ import annotations
import turnwise
from collections.abc import Mapping, Sequence
from typing import Any, Literal

class Typed:
    def __init__(self, size: int = 4, share: float = 0.5, map_seed: int = None, names: Sequence[str] = (),
                 lookup: Mapping[int | str, str] | None = None, mode: Literal["a", "b"] = "a", free=1,
                 other: Any = None, own: Typed | None = None): pass

class Unreadable:
    def __init__(self, size: Nowhere = 4): pass

@turnwise.hookimpl
def environments():
    return [turnwise.Implementation("typed", Typed), turnwise.Implementation("unreadable", Unreadable)]
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{size: '4'}", ["size: '4' is text, a whole number is needed. Fix: write it without quotes"]),
        ("{size: 4.5, share: true}", ["size: 4.5 is a number, a whole", "share: True is true or false, a number is"]),
        ("{share: .inf}", ["share: inf is not finite, a finite number is needed. Fix:"]),
        ("{names: [up, 3]}", ["names[1]: 3 is a whole number, text is needed. Fix: put it in quotes"]),
        ("{lookup: {0: 1}}", ["lookup[0]: 1 is a whole number, text is needed"]),
        ("{mode: c}", ["mode: 'c' is none of 'a', 'b'. Fix: choose one of them"]),
        ("{size: 3, share: 1, map_seed: null, names: [a], lookup: {0: a, b: c}, mode: b}", []),
        ("{free: [x], other: {a: .inf}, own: 3}", []),
    ],
)
def test_what_env_config_holds_is_of_the_constructors_types(run_yaml: Run, options: str, expected: list[str]) -> None:
    Path("my_env.py").write_text(TYPED)
    text = f"  Mine:\n    env_type: typed\n    env_config: {options}\nplugins: [./my_env.py]\n"
    if not expected:
        run_yaml(text, "train_env_manager.tags=[Mine]")
        return
    found = problems(run_yaml, text, "train_env_manager.tags=[Mine]")
    assert len(found) == len(expected), found
    for line, words in zip(found, expected, strict=True):
        assert line.startswith(f"run.yaml:18: $.custom_envs.Mine.env_config.{words}"), line


def test_annotations_that_cannot_be_read_allow_everything(run_yaml: Run) -> None:
    Path("my_env.py").write_text(TYPED)
    text = "  Mine: {env_type: unreadable, env_config: {size: x}}\nplugins: [./my_env.py]\n"
    assert run_yaml(text, "train_env_manager.tags=[Mine]").config.custom_envs["Mine"].env_config == {"size": "x"}


def test_environments_that_are_not_played_are_not_looked_up(run_yaml: Run) -> None:
    config = run_yaml("  Other: {env_type: not_installed, env_config: {a: 1}}\n").config
    assert config.custom_envs["Other"].env_type == "not_installed"


def test_options_of_an_environment_whose_package_is_missing_are_a_warning(run_yaml: Run) -> None:
    loaded = run_yaml("", "custom_envs.Lake.env_type=pond")
    assert loaded.warnings == [
        "run.yaml:15: $.custom_envs.Lake.env_config: not checked: environment 'pond' needs package_that_is_not_there,"
        " not installed here"
    ]


# --- algorithm keys


def test_a_top_level_key_reaches_the_implementation_that_has_it(run_yaml: Run) -> None:
    loaded = run_yaml("pg_clip: 0.3\nstep_reward_gamma: 0.5\n", "adv_estimator=gigpo")
    assert loaded.config.pg_variant.config.pg_clip == 0.3
    assert loaded.config.adv_estimator.config.step_reward_gamma == 0.5
    assert loaded.config.algorithm == {"pg_clip": 0.3, "step_reward_gamma": 0.5}
    assert loaded.warnings == []


def test_keys_of_the_core_reach_implementations_only_when_they_are_given(run_yaml: Run) -> None:
    untold = run_yaml("", "adv_estimator=gigpo").config
    assert (untold.gamma, untold.adv_estimator.config.gamma) == (1.0, 0.95)
    told = run_yaml("gamma: 0.9\nreward_normalization: {method: mean}\n", "adv_estimator=gigpo").config
    assert (told.gamma, told.adv_estimator.config.gamma) == (0.9, 0.9)
    assert told.adv_estimator.config.reward_normalization == told.reward_normalization
    assert told.reward_normalization is not None
    assert told.reward_normalization.method == "mean"


def test_a_key_in_both_places_is_an_error_that_names_both(run_yaml: Run) -> None:
    assert problems(run_yaml, "pg_clip: 0.3\n", "pg_variant={use: ppo, pg_clip: 0.2}") == [
        "override 'pg_variant={use: ppo, pg_clip: 0.2}': $.pg_variant.pg_clip: 0.2 here, and 0.3 at $.pg_clip. Fix:"
        " give pg_clip in one place"
    ]


def test_a_wrong_algorithm_key_is_told_at_the_line_where_it_stands(run_yaml: Run) -> None:
    assert problems(run_yaml, "pg_clip: much\n") == [
        "run.yaml:16: $.pg_clip: 'much' is text, a number is needed. Fix: write it without quotes (from the"
        " environment: ${oc.decode:${oc.env:NAME}})"
    ]
    assert problems(run_yaml, "reward_normalization: {method: mea}\n") == [
        "run.yaml:16: $.reward_normalization.method: 'mea' is none of 'identity', 'mean', 'mean_std', 'asym_clip'. "
        "Did you mean 'mean'? Fix: choose one of them"
    ]


@pytest.mark.parametrize(
    ("key", "warning"),
    [
        ("pg_clip: 0.1", "pg_clip has no effect with pg_variant 'vanilla'"),
        ("dual_clip_loss: true", "dual_clip_loss has no effect with pg_variant 'vanilla'"),
        ("step_reward_gamma: 0.9", "step_reward_gamma has no effect with adv_estimator 'grpo'"),
        ("lambd: 0.9", "lambd has no effect with adv_estimator 'grpo'"),
    ],
)
def test_a_known_key_that_nobody_uses_is_a_warning(run_yaml: Run, key: str, warning: str) -> None:
    loaded = run_yaml(f"{key}\n", "pg_variant=vanilla", "actor_train.training_args.gradient_accumulation_steps=8")
    name = key.split(":", maxsplit=1)[0]
    assert loaded.warnings == [f"run.yaml:16: $.{name}: {warning}"]
