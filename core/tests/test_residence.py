"""Roles that share devices take turns: what a run calls, in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import load
from turnwise.config.convert import to_plain
from turnwise.pipeline.loop import Pipeline
from turnwise.testing.fake_model import FakeBackend, FakeStrategy

Toy = Callable[..., Path]
PLAIN: dict[str, Any] = {"track_with": ["jsonl"], "eval_steps": 0, "val_env_manager": None, "max_steps": 1, "render_save_dir": None}


def calls(toy: Toy, monkeypatch: pytest.MonkeyPatch, train: list[int], infer: list[int], **changes: Any) -> list[str]:
    """What happens to the roles in one step of a run, a name and a method each."""
    seen: list[str] = []

    def watch(cls: type, method: str, told: Callable[[Any], str]) -> None:
        before = getattr(cls, method)

        if asyncio.iscoroutinefunction(before):

            async def called(self: Any, *args: Any) -> Any:
                seen.append(f"{told(self)}.{method}")
                return await before(self, *args)
        else:

            def called(self: Any, *args: Any) -> Any:
                seen.append(f"{told(self)}.{method}")
                return before(self, *args)

        monkeypatch.setattr(cls, method, called)

    for method in ("offload", "onload", "update", "logprobs", "offer", "save"):
        watch(FakeStrategy, method, lambda self: str(self._context.role))
    for method in ("sleep", "wake", "receive"):
        watch(FakeBackend, method, lambda self: "actor_infer")
    roles = {
        "actor_train": {"device_mapping": train, "strategy_args": {"strategy_name": "fake"}, "model_args": {"dtype": "fp32"}},
        "actor_infer": {
            "device_mapping": infer,
            "strategy_args": {"strategy_name": "fake"},
            "model_args": {"dtype": "bf16"},
            "generating_args": {"max_new_tokens": 8},
        },
    }
    loaded = load(toy(**PLAIN, **(roles | changes)), [])
    asyncio.run(Pipeline(loaded.config, Path(), to_plain(loaded.config)).run())
    return seen


def test_roles_on_devices_of_their_own_are_never_moved(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(toy, monkeypatch, train=[0], infer=[1])
    assert not [call for call in seen if call.split(".")[1] in ("offload", "onload", "sleep", "wake")]


def test_on_one_device_the_sampler_sleeps_while_the_trainer_is_there(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(toy, monkeypatch, train=[0, 1], infer=[1])
    without_updates = [call for call in seen if not call.endswith((".update", ".logprobs"))]
    assert without_updates == [
        *("actor_train.offer", "actor_infer.receive", "actor_train.offload"),  # the first weights, before the first rollout
        *("actor_infer.sleep", "actor_train.onload"),  # training
        *("actor_infer.wake", "actor_train.offer", "actor_infer.receive", "actor_train.offload"),  # the new weights
        *("actor_infer.sleep", "actor_train.onload", "actor_train.save", "actor_train.offload", "actor_infer.wake"),  # the last checkpoint
    ]
    updates = [i for i, call in enumerate(seen) if call == "actor_train.update"]
    assert updates
    assert all(seen.index("actor_train.onload") < i < seen.index("actor_infer.wake") for i in updates)


def test_a_reference_on_the_actors_device_comes_only_for_its_own_pass(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(toy, monkeypatch, train=[0], infer=[], kl_loss_coef=0.1)
    at = seen.index("reference.logprobs")
    assert seen[at - 1 : at + 2] == ["reference.onload", "reference.logprobs", "reference.offload"]
    assert "actor_infer.sleep" not in seen
