"""Memory that does not do, as vLLM tells it, in one line: the phase, the role and the keys to lower."""

from __future__ import annotations

import re

KEYS = "gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or max_model_len"
_OUT = re.compile(r"(?i)out of memory|MemoryError|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|less than desired [GC]PU memory")
_NO_CACHE = re.compile(r"No available memory for the cache blocks|larger than the available KV cache memory")
_TOO_LARGE = "less than requested memory for kv"
_FIXES = {
    "the weight update": "gpu_memory_utilization or model_update_buffer_size_mb",
    "the wake-up": "gpu_memory_utilization, or give it devices of its own",
}


def phase(name: str) -> str:
    """What the engine does in a route of its server or a step of `Engine.control`."""
    if "wake" in name or "sleep" in name:
        return "the wake-up"
    return "the weight update" if any(part in name for part in ("weight", "update", "lora", "adapters", "rpc")) else "sampling"


def told(what: str, said: str, when: str) -> str:
    """`what` happened; where `what` or the engine's words `said` show that memory did not do, with the phase `when`, the role and the fix."""
    said = f"{what}\n{said}"
    if _NO_CACHE.search(said):
        fix = "lower max_model_len, max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization (kv_cache_memory_bytes, where it is set)"
        return f"no memory left for the cache, in {when} of actor_infer: {what.rstrip('.')}. Fix: {fix}"
    if _TOO_LARGE in said:
        return f"out of memory, in {when} of actor_infer: {what.rstrip('.')}. Fix: lower kv_cache_memory_bytes or max_num_seqs"
    if _OUT.search(said):
        return f"out of memory, in {when} of actor_infer: {what.rstrip('.')}. Fix: lower {_FIXES.get(when, KEYS)}"
    return what


def killed(code: int) -> str:
    """What may be behind the exit code of a process that said nothing of memory."""
    return " (SIGKILL: if main memory was full, lower kv_cache_memory_bytes or max_num_seqs of actor_infer)" if code == -9 else ""


def chain(error: BaseException) -> str:
    """The types and words of an error and of those that it came from."""
    words, seen = [], set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        words.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return "\n".join(words)
