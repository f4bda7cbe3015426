"""Whole runs on `rlvr`: set-up C shrunk to a CPU, several tries, and a judge that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = "{recipe: {architecture: qwen2, num_layers: 1, hidden_size: 32, num_heads: 2, tokenizer: byte_bpe, vocab_size: 300}}"
SHRUNK = (
    "runtime=local", "num_gpus_per_node=null", "max_steps=2", "rollout_batch_size=4", "num_return_sequences_in_group=2", "prompt_length=480",
    "response_length=8", f"pretrain={TINY}", "actor_train.strategy_args={strategy_name: torch}", "actor_train.device_mapping=null",
    "actor_train.model_args={dtype: fp32, attn_implementation: sdpa}", "actor_train.training_args.gradient_accumulation_steps=8",
    "actor_infer.model_args={dtype: fp32, attn_implementation: sdpa}",
    "actor_infer.strategy_args={strategy_name: hf}", "actor_infer.device_mapping=null", "reference=null", "track_with=[jsonl]", "output_dir=out",
    "logging_dir=null", "checkpoint_config=null",
)  # fmt: skip


@pytest.mark.slow
def test_set_up_c_runs_shrunk_on_a_cpu(make_run: Any) -> None:
    """Mathematics from its file, compared as expressions, one batch generated ahead."""
    run = make_run("")
    data = f"custom_envs.DeepMath.env_config.data={EXAMPLES / 'data' / 'deepmath.jsonl'}"
    result = run.command("train", str(EXAMPLES / "rlvr_megatron_async.yaml"), *SHRUNK, data)
    assert result.exit_code == 0, result.output + repr(result.exception)
    lines = [line for line in run.metrics() if "policy/grad_norm" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["rollout/env_failures"] == 0
        assert line["env/DeepMath/score_math"] == 0.0  # random weights know no mathematics


TRIES = """
exp_name: tries
plugins: [turnwise-rlvr]
pretrain: {recipe: {architecture: qwen2, num_layers: 1, hidden_size: 32, num_heads: 2, tokenizer: word}}
output_dir: out
max_steps: 2
rollout_batch_size: 8
sequence_length: 96
adv_estimator: grpo
pg_variant: ppo
actor_train:
  model_args: {dtype: fp32}
  training_args: {learning_rate: 1.0e-3, per_device_train_batch_size: 8}
  strategy_args: {strategy_name: torch}
actor_infer: {model_args: {dtype: fp32}, generating_args: {max_new_tokens: 2}, strategy_args: {strategy_name: hf}}
train_env_manager: {num_env_groups: 2, group_size: 4, tags: [Numbers]}
custom_envs:
  Numbers:
    env_type: rlvr
    max_steps: 3
    env_config: {data: {generate: arithmetic, count: 40}, rewards: exact, tries: 3}
track_with: [jsonl]
"""


@pytest.mark.parametrize("manager", ["trajectory", "stepwise", "{use: stepwise, merge_steps: true}"])
def test_several_tries_are_turns_of_every_manager(make_run: Any, manager: str) -> None:
    run = make_run(TRIES)
    run.train(f"custom_envs.Numbers.env_manager={manager}")
    for line in run.metrics():
        assert line["rollout/env_failures"] == 0
        assert line["rollout/turns"] > 2 * line["rollout/episodes"]  # nearly every try fails
    texts = [json.loads(line) for line in run.trajectories("train").splitlines()]
    assert "Try again." in json.dumps(texts)


def test_a_judge_that_is_not_there_ends_the_run_and_trains_nothing(make_run: Any) -> None:
    run = make_run(TRIES)
    judge = "{use: judge, model: m, base_url: 'http://127.0.0.1:9/v1', max_retries: 0, retry_wait: 0.01}"
    result = run.command("train", "run.yaml", f"custom_envs.Numbers.env_config.rewards={judge}")
    assert result.exit_code == 1
    assert "the judge m at http://127.0.0.1:9/v1, on arithmetic, question" in result.output
    assert "no answer in 1 requests (ConnectError" in result.output
    assert not (run.folder / "out" / "metrics.jsonl").exists() or run.metrics() == []


def test_bad_rows_are_listed_before_the_start(make_run: Any) -> None:
    run = make_run(TRIES)
    (run.folder / "rows.jsonl").write_text('{"question": "1?", "answer": "1"}\n{"question": "2?"}\n')
    result = run.command("check", "run.yaml", "custom_envs.Numbers.env_config.data=rows.jsonl")
    assert result.exit_code == 2
    assert "data: 1 bad row, rlvr: " in result.output
    assert "rows.jsonl, line 2 has no answer in 'answer'" in result.output
    assert (
        run.command(
            "check", "run.yaml", "custom_envs.Numbers.env_config={data: rows.jsonl, rewards: exact, max_bad_rows: 1}"
        ).exit_code
        == 0
    )
