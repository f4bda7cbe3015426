"""What the conformance kit needs to build the strategy: a tiny random model on disk, and log-probs that plain transformers gives for it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise_torch.config import TorchConfig
from turnwise_torch.models import load_causal_lm, quiet


def tiny_model(folder: Path, seed: int = 0, vocab_size: int = 50, tied: bool = True) -> Path:
    """Write a random Qwen2 (2 layers, hidden 32, fp32, no tokenizer) to `folder` and return it."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def strategy_fixture() -> dict[str, Any]:
    """`config`, `context` (fp32, temperature .7, the loss `vanilla` of turnwise-losses), `reference_logprobs(ids, temperature)`, `vocab_size`.

    `reference_logprobs` takes int32 [n] and returns float32 [n]: entry t is the log-prob of ids[t] given ids[:t]; entry 0 is 0.
    """
    folder = tiny_model(Path(tempfile.mkdtemp(prefix="turnwise-torch-fixture-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = load_causal_lm(folder, "fp32", "eager")

    def reference_logprobs(ids: np.ndarray, temperature: float) -> np.ndarray:
        tokens = torch.as_tensor(np.asarray(ids, np.int64))[None]
        with torch.no_grad():
            every = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0].double() / temperature, -1)
        out = np.zeros(len(ids), np.float32)
        out[1:] = every[:-1].gather(-1, tokens[0, 1:, None]).squeeze(-1).numpy()
        return out

    context = TrainContext(
        model=folder,
        role="actor_train",
        dtype="fp32",
        temperature=0.7,
        objective=Objective(LossChoice("vanilla")),
        per_device_train_batch_size=2,
        infer_batch_size=2,
    )
    return {"config": TorchConfig(), "context": context, "reference_logprobs": reference_logprobs, "vocab_size": 50}
