"""`turnwise train` with batches ahead: every token of every step is a token of the checkpoint whose version it
carries."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import CLOSE, FAR, NEEDS_VLLM

from turnwise.testing.runs import LAKE, written

pytestmark = [pytest.mark.engines, NEEDS_VLLM, pytest.mark.timeout(300)]
STEPS, GROUPS, MEMBERS = 4, 2, 4
CHANGES = {
    "plugins": [*LAKE["plugins"], "turnwise-vllm", "turnwise-ray"],
    "max_steps": STEPS,
    "eval_steps": 2,
    "sequence_length": 512,
    "async_generation_ratio": 1,
    # Something to learn in every step, whatever was played.
    "entropy_loss_coef": 0.1,
    "pretrain.recipe": {
        "architecture": "qwen2", "num_layers": 2, "hidden_size": 64, "num_heads": 2, "initializer_range": 0.1,
        "tokenizer": "word", "max_position_embeddings": 512,
    },
    # Long, so that a weight update meets responses that are under way.
    "actor_infer.generating_args.max_new_tokens": 96,
    "custom_envs.Lake.max_steps": 3,
    "val_env_manager": {"num_env_groups": 4, "group_size": 1, "tags": ["Lake"]},
}  # fmt: skip


def train(folder: Path, options: str = "{}", **changes: Any) -> list[dict[str, Any]]:
    """The run's metrics; each step and its weights are left in `folder`."""
    engine = {"strategy_name": "vllm", "strategy_config": {"load_format": "dummy", **json.loads(options)}}
    dump = {"enable": True, "mode": "dump", "dump_dir": str(folder / "dumped")}
    keys = {**CHANGES, "actor_infer.strategy_args": engine, "rollout_mock": dump, **changes}
    (folder / "run.yaml").write_text(written(LAKE, keys), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "turnwise.cli.main", "train", "run.yaml"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def versions(folder: Path) -> list[set[int]]:
    """Which versions each step's tokens have, after a look at all of them: membership, age, and log-probs by the
    weights of their version."""
    from turnwise.config import load
    from turnwise.rollout.mock import read
    from turnwise_torch.fixtures import log_probs
    from turnwise_torch.models import load_causal_lm

    config = load(folder / "run.yaml").config
    (first,) = (folder / "out" / "model").iterdir()
    saved = [folder / "out" / "checkpoints" / f"checkpoint-{v:06d}" / "model" for v in range(1, STEPS)]
    models = [load_causal_lm(path, "fp32", "eager") for path in (first, *saved)]
    found: list[set[int]] = []
    for step in range(STEPS):
        trajectories = read(config, step).trajectories
        members = [(t.group, t.member) for t in trajectories]
        assert members == [(step * GROUPS + s, m) for s in range(GROUPS) for m in range(MEMBERS)]
        found.append(set())
        for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
            mine = turn.versions[turn.response_mask]
            assert (np.diff(mine) >= 0).all()
            assert ((step - 1 <= mine) & (mine <= step)).all()
            found[-1] |= set(mine.tolist())
            ids = np.concatenate([turn.prompt_ids, turn.response_ids])
            off = [np.abs(turn.logprobs - log_probs(model, ids, 1.0)[-len(turn.logprobs) :]) for model in models]
            assert all(off[v][i] < CLOSE for i, v in enumerate(turn.versions) if turn.response_mask[i])
    for before, after in itertools.pairwise(models):
        assert np.abs(log_probs(before, ids, 1.0) - log_probs(after, ids, 1.0)).max() > FAR, "the weights did not move"
    return found


def check(lines: list[dict[str, Any]]) -> None:
    """Nothing older than a step, and evaluations of one version."""
    trained = [line for line in lines if "policy/grad_norm" in line]
    assert [line["step"] for line in trained] == list(range(STEPS))
    assert max(line["async/staleness/max"] for line in trained) == 1
    assert [line["val/version_span"] for line in lines if "val/success" in line] == [0, 0, 0]
    assert {line["async/discarded_tokens"] for line in trained if "async/discarded_tokens" in line} <= {0}
    assert sum(line["rollout/env_failures"] for line in trained) == 0


def test_between_batches_each_step_has_one_version(tmp_path: Path) -> None:
    lines = train(tmp_path)
    check(lines)
    assert {line["async/version_span"] for line in lines if "async/version_span" in line} == {0}
    assert versions(tmp_path) == [{0}, {0}, {1}, {2}]


@pytest.mark.parametrize("options", ["{}", '{"mode": "server"}'])
def test_between_tokens_responses_go_on_with_new_weights(tmp_path: Path, options: str) -> None:
    lines = train(tmp_path, options, weight_update="between_tokens")
    check(lines)
    assert max(line["async/version_span"] for line in lines if "async/version_span" in line) == 1
    assert versions(tmp_path)[0] == {0}


@pytest.mark.parametrize("way", ["between_batches", pytest.param("between_tokens", marks=pytest.mark.matrix)])
def test_trainer_and_sampler_in_processes_of_their_own(tmp_path: Path, way: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    runtime = {"use": "ray", "device": "cpu", "object_store_mb": 100}
    devices = {"actor_train.device_mapping": [0], "actor_infer.device_mapping": [1]}
    lines = train(tmp_path, runtime=runtime, weight_update=way, **devices)
    check(lines)
    if way == "between_batches":
        assert versions(tmp_path) == [{0}, {0}, {1}, {2}]
    else:
        assert max(line["async/version_span"] for line in lines if "async/version_span" in line) == 1
        assert versions(tmp_path)[0] == {0}
