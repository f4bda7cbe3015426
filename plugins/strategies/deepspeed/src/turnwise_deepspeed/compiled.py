"""DeepSpeed's optimizer for CPUs, a C++ extension, compiled when it is first used."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

from turnwise.errors import MachineError
from turnwise_torch.models import first_line

_ROOT = "TORCH_EXTENSIONS_DIR"


def prepare_cpu_adam() -> None:
    """Load the extension of DeepSpeedCPUAdam into this process, compiled if need be. Raises MachineError."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    with building_alone(builder.name):
        try:
            builder.load(verbose=False)
        except Exception as error:  # DeepSpeed's own, torch's, those of the compiler's process
            raise MachineError(
                f"DeepSpeedCPUAdam cannot be compiled: {first_line(error)}. Fix: a C++ compiler and ninja, or zero_force_ds_cpu_optimizer: false"
            ) from error


@contextmanager
def building_alone(name: str) -> Iterator[None]:
    """One process of the machine at a time builds the extension, in a folder that nobody else builds in.

    torch marks a build with a file. One that was killed leaves it, and every later one waits for it, for ever and without a word. The lock
    here ends with its process: who has it may take the file away.
    """
    given = os.environ.get(_ROOT)
    root = Path(given or cpp_extension.get_default_build_root())
    own = root / f"turnwise_py{sys.version_info.major}{sys.version_info.minor}_{torch.__version__}"
    folder = own / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (own / f"{name}.lock").open("w")
    except OSError as error:
        raise MachineError(f"DeepSpeedCPUAdam cannot be compiled in {own}: {first_line(error)}. Fix: {_ROOT}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        os.environ[_ROOT] = str(own)
        try:
            yield
        finally:
            if given is None:
                del os.environ[_ROOT]
            else:
                os.environ[_ROOT] = given
