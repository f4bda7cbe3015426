"""A model sharded over the ranks of a role by FSDP2: every decoder layer a unit, the rest the root, gathered while they
compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise.contracts.train import TrainContext
from turnwise.errors import TrainerError, TurnwiseError, one_line
from turnwise_torch import lora, models
from turnwise_torch.config import FsdpConfig

T = TypeVar("T")


class Root(nn.Module):
    """Calls a function on the model as its own forward pass, so that FSDP gathers the root's parameters around whatever
    the function calls:
    the backbone and the head apart from it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """`compute(model)`; gradients flow from the tensors that it returns."""
        return compute(self.model)


class ShardedModel:
    """`model`, whose parameters are DTensors: float32 masters where they are trained, the compute dtype where not.

    It is loaded by rank 0 into main memory, and dealt out tensor by tensor: no device ever holds more than its parts,
    one whole tensor, and while it computes what FSDP gathers. All ranks build it, and call every method, at once.
    """

    def __init__(
        self, load: Callable[[str], nn.Module], context: TrainContext, config: FsdpConfig, device: torch.device
    ) -> None:
        """`load(dtype)`: the whole model on the CPU; called on rank 0 alone. Raises what it raises, on all ranks."""
        self.config, self.device, self.ranks = config, device, context.ranks
        self._offload = config.cpu_offload
        # Masters start from what the folder holds: loaded in bf16 they would be rounded before they are fp32.
        own = context.trainable and context.lora is None
        loaded = _load_on_first(lambda: load("fp32" if own and context.dtype == "bf16" else context.dtype), context)
        self.model = _skeleton(loaded, context)
        self._set_dtypes(models.torch_dtype(context.dtype), context.trainable)
        if context.trainable and context.gradient_checkpointing:
            models.enable_gradient_checkpointing(self.model)
        self.units: list[FSDPModule] = []
        self.root = self._shard(context)
        source = _values(loaded, context) if loaded is not None else {}
        self._deal_out(source)

    def __call__(self, compute: Callable[[nn.Module], T]) -> T:
        """`compute(model)` with all that it needs gathered."""
        out = self.root(compute)
        if not torch.is_grad_enabled():
            # FSDP keeps the root gathered, for a backward pass that will not come.
            self.reshard()
        return out

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`; with the `last` of an update the ranks' are summed: FSDP averages, hence the
        factor."""
        # Until the last one gradients are added up on each rank: one exchange an update, not one a micro-batch.
        self.root.set_requires_gradient_sync(last or self.config.reduce_every_microbatch)  # type: ignore[operator]
        (loss * self.ranks.size).backward()

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter, on every rank."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def reshard(self) -> None:
        """Free what is gathered."""
        for unit in self.units:
            unit.reshard()

    def move(self, device: torch.device) -> None:
        """Take the parts (and buffers) to `device`; with `cpu_offload` they stay in main memory."""
        if not self._offload:
            self.root.to(device)

    def _set_dtypes(self, compute: torch.dtype, trainable: bool) -> None:
        """Masters are float32 (wider for a wider model), what is frozen is kept as it computes; the skeleton has no
        values to round yet."""
        for parameter in self.model.parameters():
            wide = torch.promote_types(compute, torch.float32) if trainable and parameter.requires_grad else compute
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(wide)
        # It was loaded wider, to be dealt out; an export is in the compute dtype and says so.
        for module in self.model.modules():
            if hasattr(module, "config"):
                module.config.dtype = compute

    def _shard(self, context: TrainContext) -> Root:
        options: dict[str, Any] = {"mesh": init_device_mesh(self.device.type, (self.ranks.size,))}
        # A frozen model is stored as it computes: nothing to cast.
        if context.trainable and context.dtype == "bf16":
            # Summed over the ranks in fp32 as well, like everything behind the backward pass (see MasterAdamW).
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self._offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise TrainerError(
                f"{type(self.model).__name__} has no decoder layers to shard. Fix: one device for {context.role}"
            )
        # Inner modules first: the root then takes the parameters that no layer has taken.
        for layer in layers:
            fully_shard(layer, **options, reshard_after_forward=self.config.reshard_after_forward)
        root = Root(self.model)
        fully_shard(root, **options)
        self.units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        return root

    def _deal_out(self, source: dict[str, Tensor]) -> None:
        """Give every rank its part of rank 0's values, tensor by tensor; tied parameters stay one."""
        parts: dict[int, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            if self.ranks.rank == 0:
                whole = source.pop(name).to(self.device, parameter.dtype)
            else:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
            part = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements)
            # By identity: a tied parameter is named once above, and stands in two modules below.
            parts[id(parameter)] = nn.Parameter(
                part.cpu() if self._offload else part, requires_grad=parameter.requires_grad
            )
        for module in self.model.modules():
            for name, owned in module._parameters.items():
                if owned is not None:
                    module._parameters[name] = parts[id(owned)]
        for name, buffer in self.model.named_buffers():
            if self.ranks.rank == 0:
                buffer.copy_(source[f"buffer/{name}"])
            dist.broadcast(buffer, 0)


def _load_on_first(load: Callable[[], nn.Module], context: TrainContext) -> nn.Module | None:
    """The model on rank 0, with what is trained chosen; its failure on every rank."""
    loaded: nn.Module | None = None
    failure: BaseException | None = None
    told: list[TurnwiseError | None] = [None]
    if context.ranks.rank == 0:
        try:
            loaded = load()
            lora.choose_trained(loaded, context)
        except (Exception, SystemExit) as error:
            failure = error
            # Only errors of ours are sure to survive the way: others may refuse to be pickled.
            reason = f"{context.role}: rank 0 could not load the model: {one_line(error)}"
            told = [error if isinstance(error, TurnwiseError) else TrainerError(reason)]
    # Ranks that wait for a model that will never come would hang until the group's timeout, without a reason.
    dist.broadcast_object_list(told, 0)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise told[0]
    return loaded


def _skeleton(loaded: nn.Module | None, context: TrainContext) -> nn.Module:
    """The same model without values: parameters on the meta device, buffers on the CPU."""
    # Rank 0 alone has read the folder: the others build the model from the class and configuration that it sends.
    described: list[Any] = [None]
    if loaded is not None:
        backbone: Any = loaded.backbone if isinstance(loaded, models.ValueModel) else loaded
        described = [
            (type(backbone), backbone.config, next(backbone.parameters()).dtype, isinstance(loaded, models.ValueModel))
        ]
    dist.broadcast_object_list(described, 0)
    kind, config, dtype, value = described[0]
    with _empty_parameters():
        # `_from_config` of the class itself: AutoModel's public one would choose a class by the configuration.
        model: nn.Module = kind._from_config(config, dtype=dtype, attn_implementation=config._attn_implementation)
        model = models.ValueModel(model) if value else model
        lora.choose_trained(model, context)
    return model.eval()


def _values(loaded: nn.Module, context: TrainContext) -> dict[str, Tensor]:
    """Everything that ranks are dealt: parameters by name, adapters at their start, and `buffer/` names."""
    # In place of PEFT's own values, which depend on the global random state.
    adapters = lora.initial_values(loaded, context.seed) if context.trainable else {}
    return {
        **dict(loaded.named_parameters()),
        **adapters,
        **{f"buffer/{name}": buffer for name, buffer in loaded.named_buffers()},
    }


@contextlib.contextmanager
def _empty_parameters() -> Iterator[None]:
    """Parameters that modules register meanwhile have a shape and no values; torch's device context would empty the
    buffers as well."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        return (
            None
            if parameter is None or parameter.is_meta
            else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        )

    hook = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        hook.remove()
