"""Whole files as ROLL 0.3.0's users write them, in our words: `plan` takes them key by key, or refuses in one line what
has no counterpart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from turnwise.cli.main import main

ENVIRONMENTS = """\
action_pattern: <answer>(.*?)</answer>
max_tokens_per_step: 64
max_actions_per_traj: 6
env_manager_cls: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
agent_system_template: You play games.
agent_template: |
  Turn {turn_idx}: {observation}
  {actions_left} actions are left, {max_response_length} tokens each.
custom_env:
  FrozenLake:
    env_type: frozen_lake
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: ${env_manager_cls}
    agent_runner_cls: ${agent_runner_cls}
    use_thread_lock: true
    agent_system_template: ${agent_system_template}
    agent_template: ${agent_template}
    env_config: {action_pattern: "${action_pattern}", max_steps: "${max_actions_per_traj}", format_penalty: -0.01, render_mode: text}
  Boxes:
    env_type: sokoban
    max_steps: ${max_actions_per_traj}
    env_manager_cls: ${env_manager_cls}
    next_step_template: "{observation}{suffix}"
    env_config: {dim_room: [6, 6], num_boxes: 1, max_steps: "${max_actions_per_traj}", grid_lookup: {0: W, 1: ., 2: G, 3: C, 4: B, 5: A, 6: "@"}}
agent_runner_cls: null
"""

RUN = """\
defaults:
- ../config/games@_here_
- ../config/deepspeed_zero@_here_
- ../config/deepspeed_zero3_cpuoffload@_here_
hydra: {run: {dir: .}, output_subdir: null}
exp_name: games
seed: 42
output_dir: ./output
logging_dir: ./output/logs
model_name: ${exp_name}-${now:%Y%m%d}
system_envs: {SOME_VARIABLE: '1'}
checkpoint_config: {type: file_system, output_dir: /data/checkpoints}
num_gpus_per_node: 8
rpc_timeout: 72000
max_steps: 20
save_steps: 10
logging_steps: 1
eval_steps: 5
resume_from_checkpoint: false
enable_reference: true
parse_tool_call_parameter_to_dict: true
skip_mock_system_prompt: true
rollout_batch_size: 16
val_batch_size: 8
sequence_length: 4096
advantage_clip: 0.2
ppo_epochs: 1
adv_estimator: grpo
batch_adjust_mode: copy
step_reward_gamma: 1.0
init_kl_coef: 0.0
whiten_advantages: true
entropy_loss_coef: 0
max_grad_norm: 1.0
pretrain: Qwen/Qwen2.5-0.5B-Instruct
reward_pretrain: Qwen/Qwen2.5-0.5B-Instruct
actor_train:
  pg_variant: tis
  tis_upper_bound: 2.0
  model_args: {flash_attn: fa2, disable_gradient_checkpointing: false, dtype: bf16, model_type: ~, lora_rank: 0, apply_tiled_mlp: true}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1, gradient_accumulation_steps: 4, warmup_steps: 2, bf16: true}
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 4, param_dtype: bf16, reduce_dtype: fp32, reshard_after_forward: true, offload_policy: false, tiled_num_shards: 4}
  device_mapping: list(range(0,4))
  infer_batch_size: 1
actor_infer:
  model_args: {flash_attn: fa2, dtype: bf16}
  generating_args:
    {max_new_tokens: "${max_tokens_per_step}", top_p: 1.0, top_k: 50, num_beams: 1, temperature: 1, num_return_sequences: 1, repetition_penalty: 1.0}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, block_size: 16, load_format: auto}}
  num_gpus_per_worker: 1
  device_mapping: list(range(4,8))
reference:
  model_args: {attn_implementation: fa2, dtype: bf16}
  strategy_args: {strategy_name: fsdp2_infer}
  device_mapping: list(range(0,4))
reward_normalization: {grouping: traj_group_id, method: mean_std}
train_env_manager:
  max_env_num_per_worker: 4
  num_env_groups: 2
  group_size: 8
  tags: [FrozenLake, Boxes]
  num_groups_partition: [1, 1]
  system_envs: {SOME_URL: x}
  llm_proxy: {proxy_type: policy}
val_env_manager: {max_env_num_per_worker: 4, num_env_groups: 8, group_size: 1, tags: [FrozenLake], num_groups_partition: [8]}
custom_envs:
  FrozenLake: ${custom_env.FrozenLake}
  Boxes: ${custom_env.Boxes}
"""

SANDBOX = """\
  Shell:
    env_type: rock_tb_native_env
    max_steps: ${max_actions_per_traj}
    env_manager_cls: MANAGER
    agent_system_template: placeholder
    agent_template: placeholder
    env_config:
      {dataset_name: data.jsonl, tools: ~, max_steps: "${max_actions_per_traj}", sandbox_base_url: http://localhost, agent_config: {run_cmd: x}}
"""
NATIVE = "roll.pipeline.agentic.env_manager.agent_native_env_manager.AgentNativeStepEnvManager"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The run's file, beside the folder of its environments."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "games.yaml").write_text(ENVIRONMENTS)
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "run.yaml").write_text(RUN)
    return tmp_path / "games" / "run.yaml"


def test_plan_takes_a_file_of_games_key_by_key(file: Path) -> None:
    done = CliRunner().invoke(main, ["plan", str(file), "--json"])
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    assert (values["rollout_batch_size"], values["groups"], values["group_size"], values["updates_per_step"]) == (
        16,
        2,
        8,
        [1, 1],
    )
    assert any("$.custom_envs.FrozenLake.agent_runner_cls: does not apply" in line for line in values["warnings"])
    assert any("$.actor_train.pg_variant: is $.pg_variant here" in line for line in values["notes"])
    assert any("lr_scheduler_type = constant (ROLL's default is linear)" in line for line in values["notes"])


@pytest.mark.parametrize(
    ("manager", "words"), [(NATIVE, ["agent_native here, which nothing installed brings"]), ("${env_manager_cls}", [])]
)
def test_a_file_of_sandboxes_is_refused_for_its_manager_alone(file: Path, manager: str, words: list[str]) -> None:
    file.write_text(RUN.replace("[FrozenLake, Boxes]", "[FrozenLake, Shell]") + SANDBOX.replace("MANAGER", manager))
    done = CliRunner().invoke(main, ["plan", str(file)])
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.exit_code, len(errors)) == ((2, 1) if words else (0, 0)), done.stderr
    assert [word for word in words if word not in errors[0]] == []
    assert "no environment is named 'rock_tb_native_env'" in done.stderr


def test_what_no_plugin_brings_is_no_fault_of_the_machine(file: Path) -> None:
    file.write_text(
        RUN.replace("[FrozenLake, Boxes]", "[FrozenLake, Shell]") + SANDBOX.replace("MANAGER", "${env_manager_cls}")
    )
    done = CliRunner().invoke(main, ["check", str(file)])
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if "rock_tb_native_env" in line]
    assert line.startswith("config: ")


TOOLS = """\
  Arithmetic:
    env_type: rg:letter_counting
    max_steps: ${max_actions_per_traj}
    env_manager_cls: ${env_manager_cls}
    agent_runner_cls: roll.pipeline.agentic.agent_runner.gem_runner.GEMRunner
    agent_template: "{observation}{suffix}"
    TOOL
    env_config: {tool_wrapper: false, max_tool_uses: 3}
  Guess:
    env_type: game:GuessTheNumber-v0-hard
    max_steps: ${max_actions_per_traj}
    env_manager_cls: MANAGER
    env_config: {min_number: 1, max_number: 10, render_mode: text}
"""
WRAPPER = "tool_wrapper: {tool_configs: [{tool_id: python_code, tool_args: {timeout: 5}}], wrapper_args: {max_tool_uses: 1}, tool_reward: 0.05}"
CONCAT = "roll.pipeline.agentic.env_manager.step_concat_env_manager.StepConcatEnvManager"
VISION = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"


def tools(file: Path, tool: str = "tool_wrapper: ~", manager: str = CONCAT) -> None:
    """A file of calculations and guesses, with Megatron and its keys."""
    text = RUN.replace("[FrozenLake, Boxes]", "[Arithmetic, Guess]").replace("tags: [FrozenLake]", "tags: [Guess]")
    text = text.replace("strategy_name: fsdp2_infer", "strategy_name: megatron_infer")
    patches = "apply_tiled_mlp: true, moe_experts: null, apply_expert_patch: false, "
    text = text.replace("strategy_config: {fsdp_size", f"strategy_config: {{{patches}fsdp_size")
    file.write_text(text + TOOLS.replace("TOOL", tool).replace("MANAGER", manager))


@pytest.mark.parametrize("manager", [CONCAT, VISION, "${env_manager_cls}"])
def test_plan_takes_a_file_of_calculations_key_by_key(file: Path, manager: str) -> None:
    tools(file, manager=manager)
    done = CliRunner().invoke(main, ["plan", str(file)])
    assert done.exit_code == 0, done.stderr
    for name in ("rg:letter_counting", "game:GuessTheNumber-v0-hard"):
        assert f"no environment is named '{name}'" in done.stderr
    for key in ("apply_tiled_mlp", "moe_experts", "apply_expert_patch", "tiled_num_shards"):
        assert f"strategy_config.{key}: does not apply: " in done.stderr


def test_tools_are_refused_in_one_line_and_no_key_beside_them(file: Path) -> None:
    tools(file, tool=WRAPPER)
    done = CliRunner().invoke(main, ["plan", str(file)])
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.exit_code == 2
    assert "$.custom_envs.Arithmetic.tool_wrapper: " in line
    assert "no manager has tools yet" in line
    assert "Fix: remove it" in line


def test_environments_that_no_plugin_brings_are_the_only_fault_of_a_file_of_calculations(file: Path) -> None:
    tools(file)
    done = CliRunner().invoke(main, ["check", str(file)])
    lines = [line for line in done.stderr.splitlines() if line.startswith("config: ")]
    assert done.exit_code == 2
    assert len(lines) == 2, lines
    assert all("no environment is named" in line and "Fix: " in line and "pip install" not in line for line in lines)
