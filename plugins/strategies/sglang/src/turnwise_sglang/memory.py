"""Memory that does not do, as SGLang tells it, in one line: the phase, the role and the keys to lower."""

from __future__ import annotations

import re

_POOL = re.compile(
    r"(Prefill|Decode) out of memory|Try to lower your batch size|even after retracting|alloc_req_slots|Not enough memory\. Please|"
    r"(Raise|raise|increase) --mem-fraction-static|leave no GPU memory for the KV cache"
)
_OUT = re.compile(r"(?i)out of memory|MemoryError|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED")
_FIXES = {
    "the weight update": "mem_fraction_static or model_update_buffer_size_mb",
    "the wake-up": "mem_fraction_static, or give it devices of its own",
}


def phase(path: str) -> str:
    """What the server does in one of its routes."""
    if "memory_occupation" in path:
        return "the wake-up"
    return "the weight update" if "weight" in path or "lora" in path else "sampling"


def told(what: str, said: str, when: str) -> str:
    """`what` happened; where `what` or the server's words `said` show that memory did not do, with the phase `when`, the role and the fix."""
    said = f"{what}\n{said}"
    if _POOL.search(said):
        fix = "lower max_running_requests, chunked_prefill_size or context_length, or raise mem_fraction_static"
        return f"no memory left for the cache, in {when} of actor_infer: {what.rstrip('.')}. Fix: {fix}"
    if _OUT.search(said):
        keys = _FIXES.get(when, "mem_fraction_static, max_running_requests, chunked_prefill_size or context_length")
        return f"out of memory, in {when} of actor_infer: {what.rstrip('.')}. Fix: lower {keys}"
    return what
