"""States on disk: undone exactly, and refused in one line where they are damaged, dangerous or of another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_cases import five_updates, furthest, zero

from turnwise.errors import CheckpointError
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.testing import Planted, weights_of

deepspeed = pytest.importorskip(
    "deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')"
)
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
Build = Callable[..., Any]


def test_a_state_from_before_the_first_update_is_undone_exactly(build: Build, tmp_path: Path) -> None:
    first, *_ = five_updates()
    one, two = build(zero(3)), build(zero(3))
    one.save(tmp_path)
    two.update(first)
    two.load(tmp_path)
    assert one.update(first).loss == two.update(first).loss
    assert furthest(weights_of(one), weights_of(two)) == 0.0


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_state_is_reported_in_one_line(build: Build, tmp_path: Path, damage: str) -> None:
    strategy = build(zero(2))
    strategy.save(tmp_path)
    for file in tmp_path.rglob("*_states.pt"):
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"is cut short or damaged: .*\. Fix: ") as caught:
        strategy.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("which", ["model_states", "optim_states"])
def test_a_state_that_would_run_code_is_refused_before_it_does(
    build: Build, tmp_path: Path, stage: int, which: str
) -> None:
    strategy, ran = build(zero(stage)), tmp_path / "ran"
    strategy.save(tmp_path)
    for file in tmp_path.rglob(f"*{which}.pt"):
        held = torch.load(file, weights_only=False)
        torch.save({**held, "planted": Planted(ran)}, file)
    if stage == 0 and which == "optim_states":
        return strategy.load(tmp_path)  # one file holds all
    with pytest.raises(
        CheckpointError, match=r"holds more than tensors and numbers, and was not read\. Fix: "
    ) as caught:
        strategy.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert not ran.exists()


def test_a_state_of_another_model_and_a_place_that_cannot_be_written_are_reported(build: Build, tmp_path: Path) -> None:
    build(zero(1), model=tiny_model(tmp_path / "model", vocab_size=60)).save(tmp_path / "state")
    strategy = build(zero(1))
    with pytest.raises(CheckpointError, match=r"belongs to another model than .*\. Fix: "):
        strategy.load(tmp_path / "state")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the training state"):
        strategy.save(tmp_path / "file" / "below")
