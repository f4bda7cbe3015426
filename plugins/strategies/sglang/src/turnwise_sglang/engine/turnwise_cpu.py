"""What SGLang's wheel lacks on a machine without CUDA: torchvision's schemas, the native kernel package, seeded
sampling in plain torch, memory that cannot be pinned.

Active only where the environment has TURNWISE_SGLANG_CPU=1 (the backend sets it for `device: cpu`). Each part steps
back where the real thing can be loaded. It imports nothing of Turnwise.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

ON = os.environ.get("TURNWISE_SGLANG_CPU") == "1"
ATTENTION = "torch_native"
NAMED = (
    "fused_sigmoid_mul",
    "fused_qk_gemma_rmsnorm",
    "fused_qk_gemma_rmsnorm_with_gate",
    "fused_qkvzba_split_reshape_cat_contiguous",
)
"""Operators of the kernel package that are looked up when Qwen-VL's modules are imported, though other models alone call them."""
_libraries: list[Any] = []
"""torch.library keeps definitions only as long as their Library lives."""


def prepare() -> None:
    """Before SGLang is imported."""
    import turnwise_child  # type: ignore[import-not-found]

    # At the end, so that a kernel package that is installed is found before the stand-in.
    sys.meta_path.append(_NativeKernels())
    turnwise_child.declare_torchvision()
    _allow_pinning()


def _allow_pinning() -> None:
    """Let memory be asked for as pinned (SGLang's adapters do), where torch has no device to pin it for and refuses."""
    import torch

    if torch.accelerator.is_available():
        return
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


class _NativeKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last to be asked for `sgl_kernel`: a package whose every attribute is a function that raises."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name == "sgl_kernel" else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _missing  # type: ignore[method-assign]


def _missing(name: str) -> Callable[..., NoReturn]:
    # Python's own questions, such as for __path__, are not answered with an operator.
    if name.startswith("__"):
        raise AttributeError(name)

    def unbuilt(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this machine")

    return unbuilt


def allow_seeds() -> None:
    """Let `enable_deterministic_inference` work on a CPU: SGLang's seeded sampling, without its batch-invariant GPU
    kernels."""
    _define_operators()
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    for known in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if ATTENTION not in known:
            known.append(ATTENTION)
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _define_operators() -> None:
    """What the kernel package, the real one or a stand-in, does not define: the hash for seeds, and names that are only
    looked up."""
    import sgl_kernel  # type: ignore[import-not-found]  # noqa: F401 - first: to define an operator twice is an error
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
        library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    for name in NAMED:
        if not hasattr(torch.ops.sgl_kernel, f"{name}_cpu"):
            library.define(f"{name}_cpu() -> ()")
    _libraries.append(library)


def murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
    """MurmurHash3 (32 bits; Appleby 2011) of (seed, position, column): uint32 [n, m] for seeds [n] of 64 bits,
    positions [n], columns [m]."""
    import torch

    low = 0xFFFFFFFF
    seed, state = seed.view(torch.int64), torch.zeros_like(positions, dtype=torch.int64)
    for block in (seed & low, (seed >> 32) & low, positions.to(torch.int64) & low):
        state = _mixed(state, block)
    state = _mixed(state[:, None], columns.to(torch.int64)[None])
    # The length of what was hashed, in bytes: four blocks of four.
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & low
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & low
    return (state ^ (state >> 16)).to(torch.uint32)


def _mixed(state: Any, block: Any) -> Any:
    """One block of 32 bits. In int64: a product wraps at 64 bits, of which the lower 32 are right."""
    state = state ^ (_rotated((block * 0xCC9E2D51) & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF)
    return (_rotated(state, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF


def _rotated(value: Any, bits: int) -> Any:
    return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF
