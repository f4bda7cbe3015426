"""Memory that does not suffice, as SGLang reports it, and SGLang's keys."""

from __future__ import annotations

from turnwise_serving.memory import UPDATE, WAKE, Memory

MEMORY = Memory(
    share="mem_fraction_static",
    keys="mem_fraction_static, max_running_requests, chunked_prefill_size or context_length",
    cache=(
        r"(Prefill|Decode) out of memory|Try to lower your batch size|even after retracting|alloc_req_slots|Not enough"
        r" memory\. Please|"
        r"(Raise|raise|increase) --mem-fraction-static|leave no GPU memory for the KV cache"
    ),
    cache_fix="lower max_running_requests, chunked_prefill_size or context_length, or raise mem_fraction_static",
    routes={WAKE: ("memory_occupation",), UPDATE: ("weight", "lora")},
    host="engine_args.max_total_tokens or max_running_requests",
)
