"""The main job's YAML trains a folder of weights with two overrides; what is trained on is, token for token, what was
sampled."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from turnwise.data.batch import Batch
from turnwise.pipeline import learner

PATTERN = "<answer>(.*?)</answer>"
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "frozen_lake.yaml"
SYSTEM = "You are a helpful assistant. Answer in the form <answer>Left</answer>."
TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message['role'] != 'system' %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SIZES = [
    "max_steps=2",
    "eval_steps=2",
    "actor_train.training_args.warmup_steps=0",
    "rollout_batch_size=8",
    "val_batch_size=4",
    "train_env_manager={num_env_groups: 2, group_size: 4}",
    "val_env_manager.num_env_groups=4",
    "actor_train.training_args.per_device_train_batch_size=8",
    "sequence_length=512",
    "actor_infer.generating_args.max_new_tokens=12",
    "output_dir=out",
    "track_with=[{use: jsonl, every: 1}]",
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as one downloads it: config.json, model.safetensors in bf16, a byte-level BPE tokenizer of Qwen2's
    class, ChatML."""
    folder = tmp_path_factory.mktemp("weights")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [
        SYSTEM,
        "The goal is 2 down 1 right. Holes: Down, Left, Up.",
        "<answer>Right</answer>",
        "user assistant system",
    ]
    bpe.train_from_iterator(
        texts * 20,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=384,  # padded, as real ones are
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def run_of(make_run: Any, weights: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Any, list[Batch]]:
    """The run of the main job with the two overrides, and the batches that it trained on."""
    batches: list[Batch] = []
    build = learner.build_batch
    monkeypatch.setattr(learner, "build_batch", lambda *args: batches.append(build(*args)) or batches[-1])
    run = make_run("")
    result = run.command(
        "train", str(EXAMPLE), f"pretrain={weights}", f"action_pattern='{PATTERN}'", *SIZES, *overrides
    )
    assert result.exit_code == 0, result.output + repr(result.exception)
    return run, batches


def records(run: Any, split: str, step: int) -> list[dict[str, Any]]:
    return [line for text in run.trajectories(split).splitlines() if (line := json.loads(text))["step"] == step]


def prompt(observation: str, system: str = SYSTEM) -> str:
    """What ChatML makes of one observation, written out; without a system message of the manager's, the template's
    own."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"


def check_log_probs(weights: Path, turns: list[dict[str, Any]]) -> None:
    """The sampler's log-probs are those of an ordinary forward pass over prompt and response."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    for turn in turns:
        ids = torch.tensor([turn["prompt_ids"] + turn["response_ids"]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
        sampled = scores[len(turn["prompt_ids"]) - 1 :].gather(1, ids[0, len(turn["prompt_ids"]) :, None])[:, 0]
        np.testing.assert_allclose(turn["logprobs"], sampled, atol=2e-5)


def test_stepwise_every_turn_is_a_row_of_its_own(make_run: Any, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (batch, _) = run_of(make_run, weights, monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    written = OmegaConf.merge(OmegaConf.load(EXAMPLE), {"action_pattern": PATTERN})
    system = OmegaConf.select(written, "custom_envs.FrozenLake.env_manager.agent_system_template") or SYSTEM
    played = records(run, "train", 0)
    turns = [turn for trajectory in played for turn in trajectory["turns"]]
    assert len(played) == 8
    for turn in turns:
        assert tokenizer.decode(turn["prompt_ids"]) == prompt(turn["observation"], system)
        assert turn["prompt_ids"] == tokenizer.encode(prompt(turn["observation"], system))
        assert turn["action"] == ""  # this model has not learned to answer; every turn is an invalid action
        assert turn["reward"] < 0
        assert 1 <= len(turn["response_ids"]) <= 12
    rows = zip(batch.samples["start"], batch.samples["length"], strict=True)
    for (start, length), turn in zip(rows, turns, strict=True):
        row = slice(start, start + length)
        assert batch.tokens["input_ids"][row].tolist() == turn["prompt_ids"] + turn["response_ids"]
        assert batch.tokens["response_mask"][row].tolist() == [False] * len(turn["prompt_ids"]) + [True] * len(
            turn["response_ids"]
        )
    check_log_probs(weights, turns[:6])
    first, second, last = run.metrics()
    assert first["env/FrozenLake/invalid_actions"] == 1.0
    assert first["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["policy/updates"] == second["policy/updates"] == 1
    assert last["val/FrozenLakeHeldOut/failed"] == 0


def test_a_whole_conversation_is_one_row_of_the_sampled_tokens(
    make_run: Any, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = ("FrozenLake", "FrozenLakeHeldOut")
    manager = "{use: trajectory, action_pattern: '${action_pattern}', format_penalty: -0.1}"
    changed = [f"custom_envs.{tag}.env_manager={part}" for tag in tags for part in ("null", manager)]
    run, (batch, _) = run_of(make_run, weights, monkeypatch, *changed)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    played = records(run, "train", 0)
    assert len(played) == len(batch.samples) == 8
    for trajectory, start, length in zip(played, batch.samples["start"], batch.samples["length"], strict=True):
        turns = trajectory["turns"]
        assert tokenizer.decode(turns[0]["prompt_ids"]) == prompt(turns[0]["observation"])
        for before, turn in itertools.pairwise(turns):
            said = before["prompt_ids"] + before["response_ids"]
            assert turn["prompt_ids"][: len(said)] == said  # no sampled token is decoded and encoded again
            closed = "\n" if before["response_ids"][-1] == end else "<|im_end|>\n"
            continuation = f"{closed}<|im_start|>user\n{turn['observation']}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(turn["prompt_ids"][len(said) :]) == continuation
        last = turns[-1]
        row = slice(start, start + length)
        assert batch.tokens["input_ids"][row].tolist() == last["prompt_ids"] + last["response_ids"]
        mask = np.zeros(length, bool)
        for turn in turns:
            mask[len(turn["prompt_ids"]) : len(turn["prompt_ids"]) + len(turn["response_ids"])] = True
        assert batch.tokens["response_mask"][row].tolist() == mask.tolist()
        assert batch.tokens["input_ids"][row][mask].tolist() == [
            token for turn in turns for token in turn["response_ids"]
        ]
        assert all(turn["reward"] < -0.1 for turn in turns)  # invalid, and not in the format
    check_log_probs(weights, [t["turns"][-1] for t in played[:4]])
    assert run.metrics()[0]["rollout/stop/turns"] + run.metrics()[0].get("rollout/stop/length", 0) == 1


def test_the_exported_model_is_a_folder_of_weights_again(
    make_run: Any, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = run_of(make_run, weights, monkeypatch, "eval_steps=0")
    exported = run.folder / "out/checkpoints/checkpoint-000002/model"
    again, _ = run_of(make_run, exported, monkeypatch, "max_steps=1", "eval_steps=0")
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict() for folder in (weights, exported)
    )
    assert set(before) == set(after)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    first = records(again, "train", 0)[0]["turns"][0]
    check_log_probs(exported, [first])
