"""How many rows and tokens an update has, and whether the configuration's numbers fit them."""

from __future__ import annotations

from typing import Literal

from turnwise.config.problems import Report
from turnwise.config.schema import Role, RunConfig
from turnwise.contracts.loss import LossCapabilities
from turnwise.contracts.train import StrategyCapabilities
from turnwise.declared import declared_if_there
from turnwise.plugins import Registry


def check_budget(config: RunConfig, name: str, key: str, budget: int | None, report: Report) -> None:
    flag = key.replace("max_tokens_per_microbatch", "use_dynamic_batching")
    if budget is None:
        report.error(
            (name, flag), f"needs a token budget. Fix: {key}: N, at least sequence_length {config.sequence_length}"
        )
    elif budget < config.sequence_length:
        report.error(
            (name, key), f"{budget} cannot hold one sample of sequence_length {config.sequence_length}. Fix: raise it"
        )


def token_budget(config: RunConfig, role: Role, phase: Literal["train", "infer"]) -> int | None:
    """Tokens of a micro-batch, where they bound it instead of a number of rows: sequence_length for packed rows without
    a budget of their own."""
    budget: int | None = getattr(role, f"max_tokens_per_microbatch_in_{phase}")
    if role.use_sequence_packing:
        return config.sequence_length if budget is None else budget
    return budget if getattr(role, f"use_dynamic_batching_in_{phase}") else None


def data_parallel_size(role: Role) -> int:
    """How many ranks of a role see different rows, by its strategy's own arithmetic."""
    # A role without numbers is one process.
    size = strategy_capabilities(role).data_parallel_size
    return int(size(max(1, len(role.device_mapping)))) if size is not None else 1


def strategy_capabilities(role: Role) -> StrategyCapabilities:
    """What a role's training strategy declares; the defaults where it cannot be asked, which is reported where it is
    named."""
    choice = role.strategy_args
    if choice is None:
        return StrategyCapabilities()
    return declared_if_there(StrategyCapabilities, choice.name, choice.config)


def rows_per_update(role: Role) -> int:
    """U: per device × accumulation × data-parallel size."""
    return (
        role.training_args.per_device_train_batch_size
        * role.training_args.gradient_accumulation_steps
        * data_parallel_size(role)
    )


def check_updates(config: RunConfig, registry: Registry, report: Report) -> None:
    """Devices that the engine's sizes divide; and a loss without a ratio wants one update a step."""
    batch = config.rollout_batch_size
    for name in ("actor_train", "critic"):
        role: Role | None = getattr(config, name)
        if role is None:
            continue
        try:
            unit = rows_per_update(role)
        except ValueError as error:
            report.error(
                (name, "device_mapping"), f"{error}. Fix: correct the devices, or the sizes in strategy_config"
            )
            continue
        # About: the rows of a step depend on how many turns are played.
        made = -(-batch // unit) * config.ppo_epochs
        if name == "actor_train" and made > 1 and not loss_capabilities(config, registry).uses_ratio:
            text = f"{config.pg_variant.name!r} has no ratio to the old policy, and a step makes about {made} updates"
            report.warn(
                ("pg_variant",),
                f"{text}: all but the first train on another policy's samples. Fix: one update a step, or a loss with a"
                " ratio",
            )


def loss_capabilities(config: RunConfig, registry: Registry | None = None) -> LossCapabilities:
    """What the policy loss declares; the defaults where it cannot be asked, which is reported where it is named."""
    return declared_if_there(LossCapabilities, config.pg_variant.name, config.pg_variant.config, registry)
