"""DeepSpeed's optimizer for CPUs, a C++ extension, compiled when it is first used."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

from turnwise.errors import MachineError
from turnwise_deepspeed.variables import variable
from turnwise_torch.models import first_line

_ROOT = "TORCH_EXTENSIONS_DIR"


def prepare_cpu_adam() -> None:
    """Load the extension of DeepSpeedCPUAdam into this process, compiled if need be. Raises MachineError."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    try:
        with building_alone(builder.name):
            builder.load(verbose=False)
    except Exception as error:  # DeepSpeed's own, torch's, those of the compiler's process
        reason = first_line(error).rstrip(".")[:300]
        fix = (
            f"a C++ compiler and ninja, a folder that can be written to as {_ROOT}, or zero_force_ds_cpu_optimizer:"
            " false"
        )
        raise MachineError(f"DeepSpeedCPUAdam cannot be compiled: {reason}. Fix: {fix}") from error


@contextmanager
def building_alone(name: str) -> Iterator[None]:
    """One process of this machine at a time builds the extension, in a folder that nobody else builds in.

    torch marks a build with a file. One that was killed leaves it, and every later one waits for it, for ever and
    without a word. The lock
    here ends with its process: who has it and finds the file begins anew, in a new folder, in which a compiler that
    outlived its build writes nothing. Machines that share the root have folders of their own, as not every file system
    locks between them.
    """
    root = Path(os.environ.get(_ROOT) or cpp_extension.get_default_build_root())
    own = root / f"turnwise_py{platform.python_version()}_{torch.__version__}_{platform.node()}"
    folder = own / name
    own.mkdir(parents=True, exist_ok=True)
    with (own / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "lock").exists():
            shutil.rmtree(folder)
        # torch reads the place of its builds from the environment alone.
        with variable(_ROOT, str(own)):
            yield
