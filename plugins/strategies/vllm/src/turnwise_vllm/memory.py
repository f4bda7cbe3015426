"""Memory that does not suffice, as vLLM reports it, and vLLM's keys."""

from __future__ import annotations

from turnwise_serving.memory import OUT, UPDATE, WAKE, Memory

KEYS = "gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or max_model_len"
MEMORY = Memory(
    share="gpu_memory_utilization",
    keys=KEYS,
    cache=r"No available memory for the cache blocks|larger than the available KV cache memory",
    cache_fix=(
        "lower max_model_len, max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization"
        " (kv_cache_memory_bytes, where it is set)"
    ),
    routes={WAKE: ("wake", "sleep"), UPDATE: ("weight", "update", "lora", "adapters", "rpc")},
    host="kv_cache_memory_bytes or max_num_seqs",
    special={"less than requested memory for kv": "kv_cache_memory_bytes or max_num_seqs"},
    out=rf"{OUT}|less than desired [GC]PU memory",
)


def chain(error: BaseException) -> str:
    """The types and words of an error and of those that it came from."""
    words, seen = [], set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        words.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return "\n".join(words)
