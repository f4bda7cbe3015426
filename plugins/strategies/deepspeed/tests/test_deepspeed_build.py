"""DeepSpeed's own kernels: its CPU optimizer steps as torch's, and a build that was killed holds up no other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from deepspeed_cases import furthest, run_updates, zero

from turnwise.errors import MachineError
from turnwise_deepspeed import compiled
from turnwise_torch.testing import weights_of

deepspeed = pytest.importorskip(
    "deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')"
)
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
Build = Callable[..., Any]


@pytest.mark.matrix
def test_deepspeed_s_own_cpu_optimizer_steps_as_torch_s(
    build: Build, plain: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles a C++ extension, where a build was killed before."""
    leave_a_lock(tmp_path, monkeypatch)
    expected, weights = plain()
    strategy = build(evolve(zero(3, "optimizer"), zero_force_ds_cpu_optimizer=True))
    assert type(strategy.engine.basic_optimizer).__name__ == "DeepSpeedCPUAdam"
    for one, other in zip(run_updates(strategy), expected, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert furthest(weights_of(strategy), weights) <= 1e-4


def leave_a_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a build in `root` that was killed leaves behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    with compiled.building_alone("cpu_adam"):
        lock = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "cpu_adam" / "lock"
        lock.parent.mkdir()
        lock.touch()
    return lock


@pytest.mark.parametrize("fails", [False, True])
def test_a_build_waits_for_no_build_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    lock = leave_a_lock(tmp_path, monkeypatch)
    assert lock.is_file()

    def load(builder: Any, verbose: bool) -> None:
        assert not lock.exists()
        assert Path(os.environ["TORCH_EXTENSIONS_DIR"]) == lock.parent.parent
        if fails:
            raise deepspeed.ops.op_builder.builder.MissingCUDAException(
                "no compiler\nand more"
            )  # no RuntimeError, nor any other of Python's

    monkeypatch.setattr(deepspeed.ops.op_builder.CPUAdamBuilder, "load", load)
    with (
        pytest.raises(MachineError, match=r"cannot be compiled: no compiler\. Fix: .*zero_force_ds_cpu_optimizer")
        if fails
        else nullcontext()
    ):
        compiled.prepare_cpu_adam()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)


def test_one_process_builds_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    code = (
        "from turnwise_deepspeed.compiled import building_alone\nprint('here', flush=True)\nwith building_alone('x'):"
        " print('inside', flush=True)"
    )
    environment = dict(os.environ)
    with compiled.building_alone("x"):
        other = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(1)
    assert other.communicate(timeout=60)[0] == "inside\n"
