"""By which transport weights go from the trainer to the backend; what is known before a run is known by the function
that the run calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve

from turnwise.config.schema import RunConfig
from turnwise.contracts.inference import BackendCapabilities
from turnwise.contracts.runtime import RuntimeCapabilities, ServePlan, TrainPlan
from turnwise.contracts.train import StrategyCapabilities
from turnwise.declared import declared
from turnwise.errors import ConfigError
from turnwise.planning import assembly
from turnwise.plugins import registry

COMPARES_WITH_ITSELF = (
    "train_infer_correction compares old log-probs with the sampler's, but here they are the sampler's: its weights are"
    " shared with the trainer. Fix: recompute_old_logprobs: true, or remove train_infer_correction."
)


def choose(config: RunConfig) -> str:
    """The first of the backend's transports (best first) that the trainer offers and that works in this run. Raises
    ConfigError: there is none.

    `shared` needs one process, one dtype, and that nothing samples while the trainer steps. `process_group` needs
    devices of the backend's own: NCCL has no two ranks of a group on one GPU.
    """
    train, infer = config.actor_train, config.actor_infer
    runtime = declared(RuntimeCapabilities, config.runtime.name, config.runtime.config)
    trainer, backend = assembly.train_plan(config, "actor_train", Path()), assembly.serve_plan(config, Path(), None)
    sampler = registry().find("inference_backend", backend.implementation).target()
    strategy = registry().find("train_strategy", trainer.implementation).target()
    # First: it has no transport either, which is not what has to be changed.
    if sampler.input == "messages":
        raise ConfigError(
            f"$.actor_infer: {backend.implementation!r} gives no token ids, so nothing can be trained on its responses."
            " Fix: train with a backend such as hf; players serve `turnwise rollout` and `turnwise eval`."
        )
    _adapters(config, trainer, backend)
    offered, taken = _transports(strategy, trainer, runtime), _transports(sampler, backend, runtime)
    excluded = set()
    # A module of another dtype cannot be the same one.
    if not runtime.one_process or train.model_args.dtype != infer.model_args.dtype or config.async_generation_ratio:
        excluded.add("shared")
    if set(trainer.devices) & set(backend.devices):
        excluded.add("process_group")
    for transport in taken:
        if transport in offered and transport not in excluded:
            return transport
    raise ConfigError(_nothing(config, offered, taken, runtime))


def _nothing(config: RunConfig, offered: tuple[str, ...], taken: tuple[str, ...], runtime: RuntimeCapabilities) -> str:
    """Why no transport is left."""
    common = set(offered) & set(taken)
    dtypes = [config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype]
    # Each cause with the key that would change it, the most particular first.
    if common == {"shared"} and config.async_generation_ratio:
        return (
            f"$.async_generation_ratio: {config.async_generation_ratio}: the weights of this backend are shared with"
            " the trainer, which would change them while they sample. Fix: async_generation_ratio: 0, or another"
            " backend"
        )
    if common == {"shared"} and not runtime.one_process:
        return (
            f"$.runtime: the weights of this backend are shared with the trainer, and runtime {config.runtime.name!r}"
            " has several processes. Fix: runtime: local, or another backend"
        )
    if common == {"shared"}:
        return (
            f"$.actor_infer.model_args.dtype: {dtypes[1]}, actor_train has {dtypes[0]}: the weights of this backend are"
            " shared with the trainer. Fix: the same dtype for both."
        )
    if common:
        return (
            f"$.actor_infer.device_mapping: it shares devices with actor_train, and {', '.join(sorted(common))} needs"
            " devices of the backend's own. Fix: other devices, or another backend"
        )
    return (
        f"$.actor_infer: the backend takes weights by {', '.join(taken) or 'nothing'}, actor_train offers"
        f" {', '.join(offered) or 'nothing'}: no common transport. Fix: choose two that share one."
    )


def _adapters(config: RunConfig, trainer: TrainPlan, backend: ServePlan) -> None:
    """Raises ConfigError where adapters are to go alone, and a side has whole weights only."""
    if assembly.adapters_alone(config) is None:
        return
    sides = (
        ("actor_train", "offers", declared(StrategyCapabilities, trainer.implementation, trainer.config).adapters),
        ("actor_infer", "takes", declared(BackendCapabilities, backend.implementation, backend.config).adapters),
    )
    for role, does, adapters in sides:
        if not adapters:
            raise ConfigError(
                f"$.actor_train.model_args.lora_sync: the strategy of {role} {does} whole weights only. Fix: lora_sync:"
                " merged"
            )


def _transports(target: Any, plan: TrainPlan | ServePlan, runtime: RuntimeCapabilities) -> tuple[str, ...]:
    """Those of a role, as it will be where the runtime places it."""
    # Else the numbers are processes without a device.
    devices = plan.devices if runtime.gpus else ()
    found: tuple[str, ...] = target.transports(plan.config, evolve(plan.context, devices=devices))
    return found
