"""Padded, length-sorted, dynamic and packed micro-batches of the same samples: padding, time, memory, gradient.

    python benchmarks/packing.py [--samples 128] [--median 150] [--longest 1024] [--budget 4096] [--rows 4]

Lengths are lognormal, cut at the longest; half of every sample is response. Each way runs in a process of its own,
forward and backward over all samples on one CPU thread. Prints Markdown. Packed rows are masked densely (sdpa); on a
GPU with flash attention packing costs no masked pairs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from turnwise.data import microbatches
from turnwise.data.rows import Rows
from turnwise_torch import models
from turnwise_torch.head import token_log_probs
from turnwise_torch.microbatch import Layout

Groups = list[list[np.ndarray]]
VOCABULARY = 1000


def unpacked(groups: list[np.ndarray]) -> Groups:
    """Every sample in a row of its own."""
    return [[group[i : i + 1] for i in range(len(group))] for group in groups]


def in_order(lengths: np.ndarray, rows: int, _: int) -> Groups:
    """As the samples came."""
    return unpacked([np.arange(start, min(start + rows, len(lengths))) for start in range(0, len(lengths), rows)])


WAYS: dict[str, Callable[[np.ndarray, int, int], Groups]] = {
    "padded, as they came": in_order,
    "padded, sorted by length": lambda lengths, rows, _: unpacked(microbatches.by_rows(lengths, rows)),
    "dynamic: sorted, under a token budget": lambda lengths, _, budget: unpacked(
        microbatches.by_tokens(lengths, budget)
    ),
    "packed, under a token budget": lambda lengths, _, budget: microbatches.packed(lengths, budget),
}


def samples(asked: argparse.Namespace) -> Rows:
    """Random tokens in samples of a long-tailed length."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(asked.median), 1.0, asked.samples), 4, asked.longest).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.concatenate([np.arange(n) >= n // 2 for n in lengths])
    return Rows(draw.integers(0, VOCABULARY, offsets[-1]).astype(np.int32), offsets, mask)


def model(folder: Path) -> torch.nn.Module:
    """A random Qwen2 of four layers."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    with models.quiet():
        Qwen2ForCausalLM(
            Qwen2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes)
        ).save_pretrained(folder)
    return models.load_causal_lm(folder, "fp32", "sdpa")


def memory(name: str) -> int:
    """A line of /proc/self/status, in MiB: VmRSS is what the process holds, VmHWM the most that it held."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) // 1024


def measure(way: str, asked: argparse.Namespace) -> dict[str, float]:
    """One way, in this process; the least CPU time of `repeats` runs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        net = model(Path(folder))
    layout = Layout(samples(asked))
    held, seconds, gradient = memory("VmRSS"), float("inf"), 0.0
    groups = WAYS[way](layout.needed, asked.rows, asked.budget)
    for _ in range(asked.repeats):
        net.zero_grad()
        began = time.process_time()
        for group in groups:
            log_probs, _ = token_log_probs(net, layout.packed_batch(group, torch.device("cpu")), 1.0)
            (log_probs.sum() / len(layout.position)).backward()
        seconds = min(seconds, time.process_time() - began)
        gradient = float(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm())
    share = microbatches.non_padding_share(layout.needed, groups)
    return {
        "batches": len(groups),
        "share": share,
        "seconds": seconds,
        "memory": memory("VmHWM") - held,
        "gradient": gradient,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"samples": 128, "median": 150, "longest": 1024, "budget": 4096, "rows": 4, "repeats": 2}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=list(WAYS), help="measure one way and print it as JSON")
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.only, asked)))
        return
    lengths = np.diff(samples(asked).offsets)
    print(
        f"{len(lengths)} samples of {lengths.min()} to {lengths.max():,} tokens (median {int(np.median(lengths))}),"
        f" {lengths.sum():,} tokens in all;"
    )
    print(f"{asked.rows} rows a micro-batch, or a budget of {asked.budget:,} tokens.\n")
    print(
        "| micro-batches | number | padding | CPU s | tokens a CPU s | peak MiB | gradient norm"
        " |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for way in WAYS:
        out = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only", way], check=True, capture_output=True, text=True
        ).stdout
        m = json.loads(out)
        speed = lengths.sum() / m["seconds"]
        print(
            f"| {way} | {m['batches']} | {1 - m['share']:.1%} | {m['seconds']:.1f} | {speed:,.0f} | {m['memory']} |"
            f" {m['gradient']:.6f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
