"""The policies have no options: what they need is in their context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from turnwise.contracts.train import StrategyCapabilities
from turnwise.declared import declared
from turnwise.errors import PluginError, Problem


@frozen
class NoOptions:
    """No option at all."""


@frozen
class ByTrajectoryConfig(NoOptions):
    """No option, and a condition: it makes rollout_batch_size / U updates, so U must divide it."""

    def check(self, run: Any) -> Iterator[Problem]:
        """U of each trained role against the batch."""
        for name, role in (("actor_train", run.actor_train), ("critic", run.critic)):
            if role is None:
                continue
            args, batch = role.training_args, run.rollout_batch_size
            try:
                ranks = _ranks(role)
            # The devices are at fault, and reported as such.
            except ValueError:
                continue
            steps, mini = args.gradient_accumulation_steps, args.per_device_train_batch_size * ranks
            unit = steps * mini
            if batch % unit == 0:
                continue
            # Another accumulation alone mends it only where the other two factors divide the batch.
            fix = (
                f"gradient_accumulation_steps: {_divisor(batch // mini, steps)}"
                if batch % mini == 0
                else "make it divide"
            )
            sizes = (
                f"per_device_train_batch_size {args.per_device_train_batch_size} × gradient_accumulation_steps {steps}"
            )
            text = (
                f"U = {sizes} × data-parallel size {ranks} = {unit} does not divide rollout_batch_size {batch}. Fix:"
                f" {fix}"
            )
            yield Problem(f"$.{name}.training_args.gradient_accumulation_steps", text)


def _ranks(role: Any) -> int:
    """How many ranks of a role see different rows, as its strategy declares; one where it cannot be asked, which is
    reported where it is named.
    Raises ValueError: devices that its sizes do not divide."""
    choice = role.strategy_args
    try:
        known = (
            declared(StrategyCapabilities, choice.name, choice.config) if choice is not None else StrategyCapabilities()
        )
    except PluginError:
        known = StrategyCapabilities()
    return known.data_parallel_size(max(1, len(role.device_mapping))) if known.data_parallel_size is not None else 1


def _divisor(most: int, wanted: int) -> int:
    """The divisor of `most` that is nearest to `wanted`."""
    return min((d for d in range(1, most + 1) if most % d == 0), key=lambda d: (abs(d - wanted), d))
