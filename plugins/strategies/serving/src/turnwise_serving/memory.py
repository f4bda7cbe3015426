"""Memory that does not suffice, as an engine reports it, in one line: the phase, the role and the keys to lower."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import field, frozen

OUT = r"(?i)out of memory|MemoryError|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED"
"""How torch and Python say it, in every engine."""
WAKE, UPDATE, SAMPLING = "the wake-up", "the weight update", "sampling"


@frozen
class Memory:
    """One engine's reports, and its keys.

    `share`: the key for its part of the device's memory; `keys`: all that lower its need, as words; `cache`: patterns
    of a KV cache without room, and `cache_fix`; `special`: further patterns of too little memory with a fix of their
    own; `out`: patterns of the rest; `routes`: for a phase the parts of names of routes and steps that belong to it;
    `host`: the keys behind a full main memory, as words.
    """

    share: str
    keys: str
    cache: str
    cache_fix: str
    routes: Mapping[str, tuple[str, ...]]
    host: str
    special: Mapping[str, str] = field(factory=dict)
    out: str = OUT

    def phase(self, name: str) -> str:
        """What the engine does in a route of its server or a step of ours."""
        return next((phase for phase, parts in self.routes.items() if any(part in name for part in parts)), SAMPLING)

    def explained(self, what: str, said: str, when: str) -> str:
        """`what` happened; where `what` or the engine's words `said` show too little memory, with the phase `when`, the
        role and the fix."""
        said, what_alone = f"{what}\n{said}", what.rstrip(".")
        # The cache first: an engine may call it "out of memory" too, and there the share has to be raised, not lowered.
        if re.search(self.cache, said):
            return f"no memory left for the cache, in {when} of actor_infer: {what_alone}. Fix: {self.cache_fix}"
        fix = next((f"lower {keys}" for pattern, keys in self.special.items() if re.search(pattern, said)), "")
        if not fix and re.search(self.out, said):
            # In these phases the batch is not what is too large.
            phases = {
                UPDATE: f"{self.share} or model_update_buffer_size_mb",
                WAKE: f"{self.share}, or give it devices of its own",
            }
            fix = f"lower {phases.get(when, self.keys)}"
        return f"out of memory, in {when} of actor_infer: {what_alone}. Fix: {fix}" if fix else what
