"""Main memory of a training pass on a CPU: what `turnwise plan` foresees, and what the process took.

    python benchmarks/memory.py [--only NAME]

Each case is a process of its own: a random model, one optimizer step so that all state exists, then a second one, whose
peak is read. Prints Markdown; a ratio above 1 was foreseen too low."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

MB = 1e6


@frozen
class Case:
    """A model's sizes, and a micro-batch of `rows` samples of `length` tokens, all but one of them sampled."""

    name: str
    rows: int
    length: int
    dtype: str = "fp32"
    recomputed: bool = False
    packed: bool = False
    attention: str = "sdpa"
    hidden: int = 256
    layers: int = 8
    vocabulary: int = 8000
    trainable: bool = True


CASES = (
    Case("4 rows of 512", 4, 512),
    Case("4 rows of 512, recomputed", 4, 512, recomputed=True),
    Case("4 rows of 512, bf16", 4, 512, dtype="bf16"),
    Case("4 rows of 512, packed", 4, 512, packed=True),
    Case("4 rows of 512, eager attention", 4, 512, attention="eager"),
    Case("a row of 4,096", 1, 4096),
    Case("a row of 4,096, recomputed", 1, 4096, recomputed=True),
    Case("a row of 2,048, vocabulary of 150,000", 1, 2048, vocabulary=150_000, hidden=64, layers=2),
    Case("wide and shallow", 2, 1024, hidden=768, layers=3),
    Case("log-probs alone, 8 rows of 512", 8, 512, trainable=False),
)


def read(name: str) -> float:
    """A line of /proc/self/status, in bytes: VmRSS now, VmHWM the peak since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def measure(case: Case) -> dict[str, float]:
    """Bytes: `foreseen`, and `peak` beyond what the imports take."""
    import torch

    from turnwise.data.rows import Update
    from turnwise_torch.strategy import TorchStrategy

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        context = save_model(case, Path(folder))
        before = read("VmRSS")
        strategy = TorchStrategy(None, context)
        foreseen = estimated(case, Path(folder) / "config.json")
        rows = sampled(case)
        for _ in range(2):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            if case.trainable:
                strategy.update(Update(rows=rows, lr=1e-4))
            else:
                strategy.logprobs(rows)
        return {"foreseen": foreseen, "peak": read("VmHWM") - before}


def save_model(case: Case, folder: Path) -> Any:
    """Write a random model of the case; the context of the strategy that trains it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from turnwise.contracts.train import LossChoice, Objective, TrainContext

    config = Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return TrainContext(
        model=folder,
        role="actor_train",
        dtype=case.dtype,
        trainable=case.trainable,
        gradient_checkpointing=case.recomputed,
        attn_implementation=case.attention,
        objective=Objective(LossChoice("ppo")) if case.trainable else None,
        per_device_train_batch_size=case.rows,
        infer_batch_size=case.rows,
        use_sequence_packing=case.packed,
        max_tokens_per_microbatch_in_train=case.rows * case.length if case.packed else None,
        max_tokens_per_microbatch_in_infer=case.rows * case.length if case.packed else None,
    )


def sampled(case: Case) -> Any:
    """Rows of random tokens with an advantage of 1."""
    from turnwise.data.rows import Rows

    count = case.rows * (case.length - 1)
    return Rows(
        input_ids=np.random.default_rng(0).integers(0, case.vocabulary, case.rows * case.length).astype(np.int32),
        offsets=np.arange(case.rows + 1) * case.length,
        response_mask=np.tile(np.arange(case.length) > 0, case.rows),
        columns={
            "coef": np.full(count, 1 / count),
            "weight": np.ones(count),
            "advantages": np.ones(count),
            "old_log_probs": np.full(count, np.nan, np.float32),
            "infer_log_probs": np.full(count, np.nan, np.float32),
            "sample": np.repeat(np.arange(case.rows), case.length - 1),
            "turn": np.zeros(count, np.int64),
            "trajectory": np.zeros(count, np.int64),
            "versions": np.zeros(count, np.int32),
        },
    )


def estimated(case: Case, path: Path) -> float:
    """What `plan` counts for the role."""
    from turnwise.config.schema import Choice, CustomEnv, EnvManagerConfig, ModelArgs, Role, RunConfig, TrainingArgs
    from turnwise.planning import estimates
    from turnwise.planning.facts import read_facts
    from turnwise_torch.config import TorchConfig

    role = Role(
        model_args=ModelArgs(
            dtype=case.dtype,
            disable_gradient_checkpointing=not case.recomputed,
            attn_implementation=case.attention,
        ),
        training_args=TrainingArgs(per_device_train_batch_size=case.rows),
        strategy_args=Choice("torch", config=TorchConfig()),
        use_sequence_packing=case.packed,
        use_dynamic_batching_in_train=case.packed,
        max_tokens_per_microbatch_in_train=case.rows * case.length if case.packed else None,
    )
    config = RunConfig(
        max_steps=1,
        rollout_batch_size=case.rows,
        pretrain=str(path.parent),
        sequence_length=case.length,
        train_env_manager=EnvManagerConfig(1, case.rows, ("T",), (1,)),
        custom_envs={"T": CustomEnv("e", max_steps=1, env_manager=Choice("trajectory"))},
        actor_train=role,
        actor_infer=role,
    )
    facts = read_facts(path)
    assert facts is not None
    return float(estimates.total(estimates.role_memory(config, role, facts, case.trainable)))


def main() -> None:
    """Run every case in a process of its own and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    chosen = [case for case in CASES if asked.only in (None, case.name)]
    if asked.here:
        print(json.dumps(measure(chosen[0])))
        return
    print("| case | foreseen, MB | peak, MB | ratio |\n|---|---|---|---|")
    for case in chosen:
        command = [sys.executable, __file__, "--only", case.name, "--here"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        foreseen, peak = found["foreseen"], found["peak"]
        print(f"| {case.name} | {foreseen / MB:,.0f} | {peak / MB:,.0f} | {peak / foreseen:.2f} |", flush=True)


if __name__ == "__main__":
    main()
