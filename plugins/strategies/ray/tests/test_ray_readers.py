"""How many readers an offer has: where a transport ends at its node, the engines of another node share one relay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.runtime import ServePlan
from turnwise_ray.backend import RayBackend
from turnwise_ray.members import Member

pytestmark = [pytest.mark.engines]


@pytest.mark.parametrize(
    ("transport", "expected"), [("shared_memory", 2 + 1 + 1), ("process_group", 2 + 1 + 2 + 4), ("safetensors", 9)]
)
def test_readers(transport: str, expected: int) -> None:
    plan = ServePlan("actor_infer", "any", None, InferenceContext(Path(), None))
    trainer: Any = SimpleNamespace(node="here")
    backend = RayBackend(plan, *(Any,) * 4, trainer=lambda: trainer)  # type: ignore[arg-type]
    places = [("here", 2), ("here", 1), ("there", 2), ("there", 4)]
    # Placed by hand: engines on two nodes need a cluster of two, and this is about their number.
    backend._members = [
        Member(number, [], actor=object(), node=node, readers={transport: readers})
        for number, (node, readers) in enumerate(places)
    ]
    assert backend.receivers(transport) == expected
