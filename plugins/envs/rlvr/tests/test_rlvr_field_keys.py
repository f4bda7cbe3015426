"""The data sets and rewards of ROLL's pipeline of verifiable rewards become an environment `rlvr`, which asks its
questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from turnwise.config import Loaded, load
from turnwise.errors import ConfigError
from turnwise_rlvr.rlvr import Rlvr

SET_UP = Path(__file__).resolve().parents[4] / "examples" / "rlvr_megatron_async.yaml"
WORKER = "roll.pipeline.rlvr.rewards"
MATH = {"worker_cls": f"{WORKER}.math_rule_reward_worker.MathRuleRewardWorker", "tag_included": ["deepmath", "aime"]}
CHOICE = {
    "worker_cls": f"{WORKER}.multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker",
    "tag_included": ["quiz"],
}


def loaded(tmp_path: Path, rewards: Any, data_args: Any, keep: bool = False) -> Loaded:
    """Set-up C with their keys in place of ours."""
    whole = OmegaConf.load(SET_UP)
    assert isinstance(whole, type(OmegaConf.create({})))
    if not keep:
        del whole["custom_envs"], whole["train_env_manager"]
    whole["rewards"] = rewards
    whole["actor_train"]["data_args"] = data_args
    OmegaConf.save(whole, tmp_path / "run.yaml")
    return load(tmp_path / "run.yaml", planning=True)


def rows(tmp_path: Path) -> str:
    made = [
        {"messages": json.dumps([{"role": "user", "content": f"{tag} {n}?"}]), "ground_truth": "A", "tag": tag}
        for tag in ("deepmath", "quiz", "other")
        for n in range(10)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def test_domains_tags_and_shares_arrive_and_play(tmp_path: Path) -> None:
    file = rows(tmp_path)
    data_args = {
        "template": "qwen2_5",
        "file_name": [file],
        "domain_interleave_probs": {"maths": 0.75, "choices": 0.25},
    }
    found = loaded(tmp_path, {"maths": MATH, "choices": CHOICE}, data_args)
    env = found.config.custom_envs["Rlvr"]
    assert (env.env_type, env.max_steps, found.config.train_env_manager.tags) == ("rlvr", 1, ("Rlvr",))
    assert env.env_config == {
        "data": [{"path": [file], "tags": ["deepmath", "aime"], "weight": 0.75}, {"path": [file], "tags": ["quiz"], "weight": 0.25}],
        "columns": {"question": "messages", "answer": "ground_truth"},
        "rewards": [{"use": "math", "tags": ["deepmath", "aime"]}, {"use": "choice", "tags": ["quiz"]}],
    }  # fmt: skip
    assert any(
        "rewards: is custom_envs.Rlvr here, of type rlvr, with actor_train.data_args.file_name" in note
        for note in found.notes
    )
    assert any("data_args: does not apply: the chat template is the model folder's" in line for line in found.warnings)
    played = Rlvr(**env.env_config)
    asked = [played.reset(options={"index": i})[0][0]["content"] for i in range(played.num_tasks)]
    assert len(asked) == 40
    assert sum(question.startswith("deepmath") for question in asked) == 30
    assert not any(question.startswith("other") for question in asked)


def test_without_shares_the_files_are_read_for_the_tags_of_all_domains(tmp_path: Path) -> None:
    file = rows(tmp_path)
    data_args = {"file_name": file, "prompt": "text"}
    found = loaded(tmp_path, {"maths": MATH, "choices": CHOICE}, data_args).config.custom_envs["Rlvr"].env_config
    assert found["data"] == {"path": file, "tags": ["deepmath", "aime", "quiz"]}
    assert found["columns"]["question"] == "text"
    one = {"worker_cls": MATH["worker_cls"]}
    found = loaded(tmp_path, {"maths": one}, data_args).config.custom_envs["Rlvr"].env_config
    assert (found["data"], found["rewards"]) == ({"path": file}, [{"use": "math"}])


@pytest.mark.parametrize(
    ("rewards", "data_args", "keep", "message"),
    [
        ({"maths": MATH}, {"file_name": "a.jsonl"}, True, "rewards come from the environments"),
        ({"maths": MATH}, {"template": "qwen2_5"}, False, "rewards come from the environments"),
        (
            {"code": {"worker_cls": f"{WORKER}.code_sandbox_reward_worker.CodeSandboxRewardWorker"}},
            {"file_name": "a.jsonl"},
            False,
            "code.worker_cls 'CodeSandboxRewardWorker' has no counterpart; these have: MathRuleRewardWorker",
        ),
        ({"maths": None}, {"file_name": "a.jsonl"}, False, "maths.worker_cls 'None' has no counterpart"),
        (
            {"maths": MATH},
            {"file_name": "a.jsonl", "domain_interleave_probs": {"math": 1}},
            False,
            "domain_interleave_probs names 'math', which rewards does not. Fix: a domain of rewards",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_in_a_line(
    tmp_path: Path, rewards: Any, data_args: Any, keep: bool, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, rewards, data_args, keep)
    assert any(message in line for line in error.value.problems), error.value.problems
