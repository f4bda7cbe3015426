"""What the conformance kit needs to build the strategy: a tiny random model on disk, and log-probs that plain
transformers gives for it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data.trajectory import float32
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
    # Without the generators of GPUs: forking those would start CUDA in a process that only writes a folder.
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_vision_model(folder: Path, seed: int = 0, vocab_size: int = 60) -> Path:
    """Write a random Qwen2.5-VL (2 layers, hidden 32, vision tower of 2 layers, fp32, image processor, no tokenizer) to
    `folder`, and return it.

    Ids 50 to 53: image, video, start and end of an image.
    """
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        # Time, height and width share the four frequencies of a head of 8 numbers.
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    tokens = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16).save_pretrained(folder)
    return folder


def strategy_fixture() -> dict[str, Any]:
    """`config`, `context` (fp32, temperature .7, the loss `vanilla` of turnwise-losses), `reference_logprobs(ids,
    temperature)`, `vocab_size`.

    `reference_logprobs` takes int32 [n] and returns float32 [n]: entry t is the log-prob of ids[t] given ids[:t]; entry
    0 is 0.
    """
    folder = tiny_model(Path(tempfile.mkdtemp(prefix="turnwise-torch-fixture-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = load_causal_lm(folder, "fp32", "eager")

    def reference_logprobs(ids: np.ndarray, temperature: float) -> np.ndarray:
        tokens = torch.as_tensor(np.asarray(ids, np.int64))[None]
        with torch.no_grad():
            # In double precision: the reference must not add an error of its own to that of the strategy.
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


def log_probs(model: Any, ids: Sequence[int] | np.ndarray, temperature: float) -> np.ndarray:
    """float32 [n] for ids [n]: the log-prob of each id given those before it (0 for the first), by one plain forward
    pass, of log_softmax(logits / temperature)."""
    tokens = torch.tensor(np.asarray(ids), dtype=torch.int64)
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    chosen = torch.log_softmax(logits / (temperature or 1.0), dim=-1).gather(1, tokens[1:, None])[:, 0]
    return float32(np.concatenate([[0.0], chosen.numpy()]))
