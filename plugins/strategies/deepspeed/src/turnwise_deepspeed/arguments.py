"""From our configuration to DeepSpeed's: what is set here, and every other name compared with what DeepSpeed itself
reads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import attrs

from turnwise.contracts.train import TrainContext
from turnwise.errors import Problem, did_you_mean
from turnwise_deepspeed.config import DeepspeedConfig
from turnwise_deepspeed.start import load

OURS = {
    "train_batch_size": "rollout_batch_size and training_args.gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "training_args.per_device_train_batch_size",
    "gradient_accumulation_steps": "training_args.gradient_accumulation_steps",
    "gradient_clipping": "training_args.max_grad_norm",
    "optimizer": "training_args.learning_rate and weight_decay, betas and eps beside this key",
    "scheduler": "training_args.lr_scheduler_type",
    "fp16": "model_args.dtype",
    "bf16": "model_args.dtype",
    "bfloat16": "model_args.dtype",
    "torch_autocast": "model_args.dtype",
    "data_types": "model_args.dtype (gradients are summed in fp32)",
    "activation_checkpointing": "model_args.disable_gradient_checkpointing",
}
"""Keys that the run sets, and where it takes them from. `auto` says just that."""
FIXED = {"zero_allow_untested_optimizer": True, "managed_gradient_accumulation": False, "gradient_allreduce_op": "mean"}
"""Keys that have one value here: the optimizer is torch's, and the number of micro-batches varies."""
OTHER_FORMS = (
    "sequence_parallel_size",
    "data_parallel_size",
    "tensor_parallel",
    "expert_parallel",
    "pipeline",
    "hybrid_engine",
    "data_efficiency",
    "compile",
)
"""Ways to split or feed a model for which rows would have to be dealt otherwise."""


def engine_config(config: DeepspeedConfig, context: TrainContext) -> dict[str, Any]:
    """DeepSpeed's own configuration, as a dictionary."""
    stage = config.zero_stage
    # `auto` means that the run sets the value, as it does for a trainer elsewhere: here it is as if left out.
    zero = {**_without_auto(config.zero_optimization), "stage": stage}
    if stage != 2:
        # Elsewhere DeepSpeed supports it only with a fixed number of micro-batches.
        zero.setdefault("overlap_comm", False)
    settings = {
        **{name: value for name, value in _without_auto(config.engine_args).items() if name not in OURS},
        **FIXED,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": config.zero_force_ds_cpu_optimizer,
        "train_micro_batch_size_per_gpu": 1,  # of no effect but on DeepSpeed's own throughput counter: sizes vary
        # Its number of micro-batches is fixed, ours varies from update to update (see FIXED): `step` is called once for
        # all.
        "gradient_accumulation_steps": 1,
        # At stage 0 in fp32 DeepSpeed would clip without reporting the norm: the strategy clips.
        "gradient_clipping": 0.0 if stage == 0 and context.dtype == "fp32" else context.max_grad_norm,
    }
    if context.trainable and context.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
        if stage > 0:
            # By default DeepSpeed sums micro-batches in the model's 16 bits. Stage 0 takes no other dtype
            # (NotImplementedError).
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def problems(config: DeepspeedConfig, context: TrainContext) -> list[Problem]:
    """What is wrong with the options; names and values by DeepSpeed's own classes where it is installed."""
    where = f"{context.role}.strategy_args.strategy_config"
    lines = [*_conflicts(config, where), *_combinations(config, where)]
    if importlib.util.find_spec("deepspeed") is not None:
        lines += _unknown(config, context, where)
    return lines


def _conflicts(config: DeepspeedConfig, where: str) -> Iterator[Problem]:
    own = {attribute.name for attribute in attrs.fields(DeepspeedConfig)}
    for name, value in config.engine_args.items():
        if name in own:
            yield Problem(f"{where}.engine_args.{name}", f"has a key of its own. Fix: {name} beside engine_args")
        automatic = value == "auto" or (isinstance(value, Mapping) and value.get("enabled") == "auto")
        if name in OURS and not automatic:
            yield Problem(f"{where}.{name}", f"set by the run. Fix: leave it out, and set {OURS[name]}")
        elif name in FIXED and value not in ("auto", FIXED[name]):
            yield Problem(f"{where}.{name}", f"always {_yaml(FIXED[name])} here, got {_yaml(value)}. Fix: leave it out")
        elif name in OTHER_FORMS:
            yield Problem(
                f"{where}.{name}",
                "this strategy shards by ZeRO alone. Fix: leave it out, or strategy_name: megatron for other forms of"
                " parallelism",
            )


def _combinations(config: DeepspeedConfig, where: str) -> Iterator[Problem]:
    stage, zero = config.zero_stage, config.zero_optimization
    if config.offloads("param") and stage != 3:
        yield Problem(
            f"{where}.zero_optimization.offload_param",
            f"only stage 3 offloads weights, this is stage {stage}. Fix: stage: 3, or leave it out",
        )
    if config.offloads("optimizer") and stage == 0:
        yield Problem(
            f"{where}.zero_optimization.offload_optimizer",
            "stage 0 has no sharded optimizer to offload. Fix: stage: 1, 2 or 3, or leave it out",
        )
    if zero.get("overlap_comm") is True and stage in (0, 1):
        yield Problem(
            f"{where}.zero_optimization.overlap_comm",
            f"not at stage {stage}, where the number of micro-batches varies. Fix: leave it out",
        )
    if zero.get("zenflow") is not None:
        yield Problem(
            f"{where}.zero_optimization.zenflow", "it steps with gradients of earlier updates. Fix: leave it out"
        )
    if config.zero_force_ds_cpu_optimizer and not config.offloads("optimizer"):
        yield Problem(
            f"{where}.zero_force_ds_cpu_optimizer",
            "DeepSpeedCPUAdam steps an optimizer that is offloaded. Fix: zero_optimization: {offload_optimizer:"
            " {device: cpu}}, or leave it out",
        )


class _Recording(dict[str, Any]):
    """A dictionary that remembers for which keys it was asked, copies included: those are the names that a parser
    knows."""

    # On the class: DeepSpeed's parser copies its dictionary, and what the copies are asked for counts, too.
    asked: ClassVar[set[str]] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of dict."""
        self.asked.add(key)
        return super().get(key, default)


def _unknown(config: DeepspeedConfig, context: TrainContext, where: str) -> Iterator[Problem]:
    """What DeepSpeed's own classes say of the configuration."""
    load()
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    settings = _Recording(engine_config(config, context))
    # DeepSpeed lists its option names nowhere and ignores unknown ones: what its parser asks for are the names.
    _Recording.asked = set()
    parsed = True
    try:
        DeepSpeedConfig(settings)
    except ValidationError as error:
        parsed = False
        yield from _invalid(error, where)
    except (DeepSpeedConfigError, ValueError, TypeError, AssertionError, AttributeError) as error:
        parsed = False
        why = " ".join(str(error).split()) or type(error).__name__
        yield Problem(where, f"DeepSpeed refuses it: {why}. Fix: correct the options")
    # An error ends the reading, and what was not read yet would look unknown.
    if parsed:
        # The run's own keys were left out of what the parser saw, so it cannot have asked for all of them.
        known = _Recording.asked | set(OURS) | set(OTHER_FORMS)
        names = known | {attribute.name for attribute in attrs.fields(DeepspeedConfig)}
        for name in config.engine_args:
            if name not in known:
                hint = did_you_mean(name, sorted(names))
                yield Problem(where, f"DeepSpeed has no option {name!r}.{hint} Fix: correct or remove it")


def _invalid(error: Any, where: str) -> Iterator[Problem]:
    """One problem for each thing that a class of DeepSpeed found; `error` is pydantic's."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models = [DeepSpeedZeroConfig, DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig]
    model = next((m for m in models if m.__name__ == error.title), None)
    block = f"{where}.zero_optimization" if model is DeepSpeedZeroConfig else where
    for found in error.errors():
        *path, name = found["loc"] or ("",)
        inner = {"offload_optimizer": models[1], "offload_param": models[2]}.get(str(path[-1])) if path else model
        place = ".".join([block, *map(str, path)])
        if found["type"] == "extra_forbidden":
            known = (
                []
                if inner is None
                else [key for field, info in inner.model_fields.items() for key in (field, info.alias) if key]
            )
            hint = did_you_mean(str(name), known)
            yield Problem(place, f"DeepSpeed has no option {str(name)!r}.{hint} Fix: correct or remove it")
        else:
            text = f"{found['msg']}, got {found['input']!r}. Fix: correct the value"
            yield Problem(f"{place}.{name}" if name != "" else place, text)


def _without_auto(block: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in block.items()
        if value is not None and value != "auto"
    }


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
