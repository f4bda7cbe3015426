"""One case for every key that ROLL's files of version 0.3.0 brought: translated, named as not applying, or refused in
one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from key_cases import named, translated, unused

from turnwise import Implementation
from turnwise.config import Loaded, load
from turnwise.errors import ConfigError
from turnwise.plugins import Registry
from turnwise.testing.registered import made

Run = Callable[..., Loaded]
LAKE, MANAGER, TRAIN, INFER = "custom_envs.Lake", "custom_envs.Lake.env_manager", "actor_train", "actor_infer"
STRATEGY = f"{TRAIN}.strategy_args.strategy_config"
MANAGERS, RUNNERS = "roll.pipeline.agentic.env_manager", "roll.pipeline.agentic.agent_runner"
GAME = [
    f"{LAKE}.env_manager_cls={MANAGERS}.proxy_env_manager.ProxyEnvManager",
    f"{LAKE}.agent_runner_cls={RUNNERS}.gem_runner.GEMRunner",
]

TRANSLATED: list[tuple[str, list[str], str, Any]] = [  # the key, overrides, where its value arrives, the value
    (f"{TRAIN}.pg_variant", ["pg_variant=gspo", f"{TRAIN}.pg_variant=gspo"], "pg_variant.use", "gspo"),
    (
        f"{TRAIN}.gspo_level",
        ["pg_variant=gspo", f"{TRAIN}.pg_variant=gspo", f"{TRAIN}.gspo_level=segment"],
        "pg_variant.gspo_level",
        "segment",
    ),
    (f"{TRAIN}.pg_clip", [f"{TRAIN}.pg_clip=0.1"], "pg_variant.pg_clip", 0.1),
    (
        f"{LAKE}.env_manager_cls",
        [f"{LAKE}.env_manager_cls={MANAGERS}.step_concat_env_manager.StepConcatEnvManager"],
        f"{MANAGER}",
        {
            "use": "stepwise",
            "history": "messages",
            "action_pattern": None,
            "format_penalty": 0.0,
            "agent_system_template": None,
        }
        | {
            "agent_template": None,
            "pre_step_template": None,
            "next_step_template": None,
            "history_length": None,
            "merge_steps": True,
        },
    ),
    (f"{LAKE}.env_manager_cls", GAME, f"{MANAGER}.use", "trajectory"),
    (f"{LAKE}.agent_runner_cls", GAME, f"{MANAGER}.use", "trajectory"),
    (
        f"{LAKE}.next_step_template",
        [f"{LAKE}.next_step_template='{{observation}} {{suffix}}'"],
        f"{MANAGER}.next_step_template",
        "{observation} ",
    ),
    (f"{TRAIN}.model_args.lora_rank", [f"{TRAIN}.model_args.lora_rank=0"], f"{TRAIN}.model_args.lora_rank", None),
]

UNUSED: list[tuple[str, list[str], str]] = [  # the key, overrides, the reason
    (f"{LAKE}.agent_runner_cls", [f"{LAKE}.agent_runner_cls=null"], "managers play the episodes"),
    ("agent_runner_cls", ["agent_runner_cls=null"], "managers play the episodes"),
    ("env_manager_cls", [f"env_manager_cls={MANAGERS}.traj_env_manager.TrajEnvManager"], "each tag names its manager"),
    (f"{LAKE}.tool_wrapper", [f"{LAKE}.tool_wrapper=null"], "no manager has tools yet"),
    (f"{LAKE}.env_config.render_mode", [f"{LAKE}.env_config.render_mode=text"], "observations are text"),
    *((f"{place}.{key}", [f"{place}.{key}=2"], "a patch of ROLL's own model code")
      for key in ("apply_tiled_mlp", "tiled_num_shards", "moe_experts", "apply_expert_patch") for place in (TRAIN, f"{TRAIN}.model_args", STRATEGY)),
    (f"{STRATEGY}.fsdp_size", [f"{STRATEGY}.fsdp_size=8"], "over the devices of its role"),
    *((f"{STRATEGY}.{key}", [f"{STRATEGY}.{key}=bf16"], "is the compute type") for key in ("param_dtype", "reduce_dtype", "wrap_policy")),
    (f"{TRAIN}.model_args.lora_dropout", [f"{TRAIN}.model_args.lora_dropout=0.0"], "without dropout"),
    *((f"{TRAIN}.training_args.{key}", [f"{TRAIN}.training_args.{key}=1"], "") for key in ("bf16", "max_steps", "num_train_epochs")),
    (f"{INFER}.generating_args.repetition_penalty", [f"{INFER}.generating_args.repetition_penalty=1.0"], "the plain distribution"),
    (f"{INFER}.num_gpus_per_worker", [f"{INFER}.num_gpus_per_worker=1"], "how many devices an engine has"),
    (f"{TRAIN}.model_update_frequency", [f"{TRAIN}.model_update_frequency=1"], "the weights of every step"),
    ("enable_reference", ["enable_reference=true"], "where a KL coefficient is positive"),
    ("num_nodes", ["num_nodes=1"], "the devices of the roles"),
    ("transfer_backend", ["transfer_backend={backend_name: null}"], "the transport"),
    ("parse_tool_call_parameter_to_dict", ["parse_tool_call_parameter_to_dict=true"], "the chat template"),
    ("skip_mock_system_prompt", ["skip_mock_system_prompt=true"], "no system message is made up"),
    ("train_env_manager.system_envs", ["train_env_manager.system_envs={A: b}"], "Fix: export them"),
    ("train_env_manager.llm_proxy", ["train_env_manager.llm_proxy={proxy_type: policy}"], "asks the sampler itself"),
]  # fmt: skip

REFUSED: list[tuple[str, list[str], str]] = [  # the key, overrides, the message
    *((f"{LAKE}.env_manager_cls", [f"{LAKE}.env_manager_cls={MANAGERS}.x.{name}"], "(agent_native here, which nothing installed brings)")
      for name in ("AgentNativeStepEnvManager", "ProxyEnvManager")),
    (f"{LAKE}.agent_runner_cls", [f"{LAKE}.agent_runner_cls={RUNNERS}.other.DeepRunner"], "an episode is played by its manager"),
    (f"{LAKE}.tool_wrapper", [f"{LAKE}.tool_wrapper={{tool_configs: [{{tool_id: python}}], tool_reward: 0.1}}"], "no manager has tools yet"),
    (f"{LAKE}.env_config.render_mode", [f"{LAKE}.env_config.render_mode=rgb_array"], "environment 'lake' has no pictures"),
    (f"{INFER}.generating_args.repetition_penalty", [f"{INFER}.generating_args.repetition_penalty=1.1"], "Fix: repetition_penalty: 1"),
    (f"{TRAIN}.model_args.lora_dropout", [f"{TRAIN}.model_args.lora_dropout=0.1"], "without dropout"),
    (f"{TRAIN}.model_update_frequency", [f"{TRAIN}.model_update_frequency=2"], "Fix: model_update_frequency: 1"),
    ("train_env_manager.llm_proxy", ["train_env_manager.llm_proxy={proxy_type: openai}"], "a proxy of type 'openai' has no counterpart"),
    ("rewards", ["rewards={math: {}}"], "rewards come from the environments"),
    ("validation", ["validation={eval_steps: 1}"], "evaluation plays environments"),
]  # fmt: skip


@frozen
class Fsdp:
    cpu_offload: bool = False
    reshard_after_forward: bool = True


@frozen
class Sharded:
    stage: int = 0
    fsdp: Fsdp = field(factory=Fsdp)


@pytest.mark.parametrize(("key", "overrides", "target", "value"), named(TRANSLATED))
def test_a_key_of_theirs_arrives_and_is_noted(
    run_yaml: Run, key: str, overrides: list[str], target: str, value: Any
) -> None:
    loaded = run_yaml("", *overrides)
    translated(loaded, key, target, value)
    assert loaded.foreign


@pytest.mark.parametrize(("key", "overrides", "reason"), named(UNUSED))
def test_a_key_of_theirs_that_does_not_apply_is_named_with_its_reason(
    run_yaml: Run, key: str, overrides: list[str], reason: str
) -> None:
    unused(run_yaml("", *overrides), key, reason)


@pytest.mark.parametrize(("key", "overrides", "message"), named(REFUSED))
def test_what_has_no_counterpart_is_refused_in_one_line_and_no_key_beside_it(
    run_yaml: Run, key: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("", *overrides)
    (line,) = caught.value.problems
    assert f"$.{key}: " in line
    assert message in line
    assert "Fix: " in line


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("offload_policy", True, ("cpu_offload", True)),
        ("reshard_after_forward", False, ("reshard_after_forward", False)),
    ],
)
def test_options_of_fsdp2_stand_under_fsdp_here(
    base_yaml: str, tmp_path: Path, fake_registry: Registry, name: str, value: bool, option: tuple[str, bool]
) -> None:
    fake_registry.add(made("train_strategy", Implementation("sharded", object, Sharded, aliases=("fsdp2_train",))))
    (tmp_path / "run.yaml").write_text(base_yaml)
    overrides = [f"{TRAIN}.strategy_args.strategy_name=fsdp2_train", f"{STRATEGY}.{name}={str(value).lower()}"]
    strategy = load(tmp_path / "run.yaml", overrides, registry=fake_registry).config.actor_train.strategy_args
    assert strategy is not None
    assert getattr(strategy.config.fsdp, option[0]) is option[1]


def test_a_loss_under_the_trained_role_is_that_of_the_run(base_yaml: str, run_yaml: Run) -> None:
    text = base_yaml.replace("pg_variant: ppo\n", "").replace("actor_train:\n", "actor_train:\n  pg_variant: gspo\n")
    assert run_yaml(text, base=False).config.pg_variant.name == "gspo"


def test_a_file_of_ones_own_is_not_foreign(run_yaml: Run) -> None:
    assert not run_yaml("").foreign
