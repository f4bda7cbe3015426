"""Tiny models, random rows, plain torch to compare with, and groups of ranks for the tests of turnwise-megatron."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data.rows import Rows, Update
from turnwise.ports import free_port
from turnwise.testing.ranks import run_ranks

WORKER = Path(__file__).with_name("megatron_worker.py")
VOCABULARY = 51
COUNTS = (9, 4, 1, 7, 5)
"""Samples of the five updates: with two data parallel ranks one of them has none in the third."""
RATES = (1e-3, 8e-4, 2e-3, 5e-4, 1e-3)


def make_model(folder: Path, family: str = "qwen2", tied: bool = True, seed: int = 0, **changes: Any) -> Path:
    """A random model in fp32, larger weights than usual so that mistakes show: 2 layers, 4 heads in 2 groups, an odd
    vocabulary."""
    options: dict[str, Any] = {"head_dim": 16} if family in ("qwen3", "qwen3_moe") else {}
    if family == "qwen3_moe":  # a dense layer before one of four experts
        options |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        }
    if family == "llama":
        scaled = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        options["rope_parameters"] = {**scaled, "original_max_position_embeddings": 16}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        **{**options, **changes},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(3.0)
        model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def make_rows(seed: int, samples: int) -> Rows:
    """Samples of 5 to 20 tokens, two turns each, with every column of an update."""
    rng = np.random.default_rng(seed)
    ids, masks, turns = [], [], []
    for s in range(samples):
        mask, turn = np.zeros(int(rng.integers(5, 21)), bool), np.full(20, -1)
        mask[1:3], turn[1:3] = True, 2 * s
        mask[4 : int(rng.integers(5, 10))] = True
        turn[4:] = 2 * s + 1
        ids.append(rng.integers(0, VOCABULARY, len(mask)).astype(np.int32))
        masks.append(mask)
        turns.append(turn[: len(mask)][mask])
    mask = np.concatenate(masks)
    counts, n = [int(m.sum()) for m in masks], int(mask.sum())
    weight = np.repeat(rng.choice([0.5, 1.0], samples), counts)
    old = (-np.log(VOCABULARY) + 0.3 * rng.normal(size=n)).astype(np.float32)
    owner = np.repeat(np.arange(samples), counts)
    return Rows(
        input_ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum([len(i) for i in ids])]).astype(np.int64),
        response_mask=mask,
        columns={
            "coef": weight * (rng.random(n) > 0.2) / n,
            "weight": weight,
            "advantages": rng.normal(size=n),
            "old_log_probs": old,
            "ref_log_probs": old + rng.normal(size=n).astype(np.float32) * 0.1,
            "infer_log_probs": old + rng.normal(size=n).astype(np.float32) * 0.1,
            "returns": rng.normal(size=n),
            "values": 0.1 * rng.normal(size=n),
            "scores": rng.normal(size=samples)[owner],
            "trajectory_advantages": rng.normal(size=samples)[owner],
            "sample": owner,
            "turn": np.concatenate(turns),
            "trajectory": owner,
            "versions": np.zeros(n, np.int32),
        },
    )


def five_updates(entropy_coef: float = 0.02) -> list[Update]:
    """Updates with different numbers of samples, and so of micro-batches."""
    return [
        Update(make_rows(seed, n), lr, entropy_coef=entropy_coef) for seed, (n, lr) in enumerate(zip(COUNTS, RATES))
    ]


def context_of(folder: Path, **changes: Any) -> TrainContext:
    options: dict[str, Any] = {
        "model": folder,
        "role": "actor_train",
        "dtype": "fp32",
        "temperature": 0.7,
        "objective": Objective(LossChoice("vanilla")),
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": 2,
        "infer_batch_size": 3,
        "bucket_bytes": 4096,
        "weight_sync_timeout": 30.0,
        "runtime_timeout": 300.0,
    }
    return TrainContext(**{**options, **changes})


def plain_log_probs(model: torch.nn.Module, rows: Rows, temperature: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) of every sampled token, one sample and no padding at a time."""
    log_probs, entropies = [], []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:]):
        ids = torch.from_numpy(rows.input_ids[start:end].astype(np.int64))
        every = torch.log_softmax(model(ids[None], use_cache=False).logits[0] / temperature, -1)
        at = torch.from_numpy(np.flatnonzero(rows.response_mask[start:end]))
        log_probs.append(every[at - 1, ids[at]])
        entropies.append(-(every.exp() * every).sum(-1)[at - 1])
    return torch.cat(log_probs), torch.cat(entropies)


def checkpoint_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict under the names of checkpoints: transformers holds a layer's experts as one tensor, files hold them
    one by one."""
    out = {}
    for name, tensor in state.items():
        layer, _, part = name.rpartition(".")
        if not layer.endswith(".experts"):
            out[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = (
                {"gate_proj": expert[: len(expert) // 2], "up_proj": expert[len(expert) // 2 :]}
                if part == "gate_up_proj"
                else {part: expert}
            )
            out |= {f"{layer}.{number}.{key}.weight": value for key, value in parts.items()}
    return out


def plain_training(folder: Path, updates: list[Update]) -> dict[str, Any]:
    """Plain AdamW on the transformers model: losses, gradient norms, weights after each three and all updates."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    out: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "before": checkpoint_names({name: p.clone() for name, p in model.state_dict().items()}),
    }
    for update in updates:
        coef, advantages = (torch.from_numpy(update.rows.columns[name]).float() for name in ("coef", "advantages"))
        log_probs, entropies = plain_log_probs(model, update.rows)
        loss = -(coef * (advantages * log_probs + update.entropy_coef * entropies)).sum()
        adam.zero_grad()
        loss.backward()
        out["losses"].append(loss.item())
        out["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in adam.param_groups:
            group["lr"] = update.lr
        adam.step()
    return {**out, "after": checkpoint_names({name: p.detach().clone() for name, p in model.state_dict().items()})}


def start_ranks(folder: Path, size: int, cases: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the cases on `size` processes that meet on loopback ports; what each rank reported."""
    ports = [free_port() for _ in range(3 * len(cases))]  # a group that is left does not meet there again
    given = {name: {**case, "ports": ports[3 * n : 3 * n + 3]} for n, (name, case) in enumerate(cases.items())}
    (folder / "cases.pkl").write_bytes(pickle.dumps(given))
    command = [sys.executable, str(WORKER), str(folder)]
    codes, said = run_ranks(
        lambda rank: [*command, str(rank), str(size)], size, folder, environment={"OMP_NUM_THREADS": "1"}, timeout=600
    )
    assert codes == [0] * size, said
    return [pickle.loads((folder / f"reported-{rank}.pkl").read_bytes()) for rank in range(size)]


@pytest.fixture(scope="session")
def lab() -> Any:
    """The functions of this file."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with tied embeddings."""
    return make_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def build(lab: Any, qwen2: Path) -> Iterator[Any]:
    """Build the strategy on the tiny Qwen2; keywords go to the context, `config` is the strategy's. All are closed in
    the end."""
    from turnwise_megatron.strategy import MegatronStrategy

    gc.freeze()  # what is there stays out of the collection below
    made = []

    def make(config: Any = None, model: Path = qwen2, **changes: Any) -> Any:
        made.append(MegatronStrategy(config, lab.context_of(model, **changes)))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()
    made.clear()
    gc.collect()  # Megatron's cycles hold descriptors
