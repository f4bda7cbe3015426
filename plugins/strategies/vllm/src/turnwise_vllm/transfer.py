"""Inside vLLM's workers: new weights are read, completed, and loaded layer by layer over the old ones.

vLLM imports this module in each worker (as its worker extension) and calls `Receiver` through its weight-transfer
interface.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from turnwise.errors import EngineError, listed
from turnwise_torch.broadcast import Member
from turnwise_torch.stream import receive
from turnwise_vllm import adapters
from turnwise_vllm.arguments import TRANSFER
from turnwise_vllm.seeds import take_back_draws

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
# As checkpoints name them: model.layers.3.mlp.experts.7.up_proj.weight.
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_OTHER_TARGET = "Fix: another lora_target, or lora_sync: merged"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed upon before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where to read the weights: by `shared_memory` or `process_group` the `payload` of turnwise_torch.stream or
    .broadcast, by `safetensors` a `folder`. `timeout`: seconds of silence."""

    transport: str = "safetensors"
    payload: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    timeout: float = 600.0


class Receiver(WeightTransferEngine):
    """Reads Hugging Face state-dict names. Refuses an update that does not cover the model: what it left out would keep
    old or no values."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        # Kept from update to update: so is the process group that it joins.
        self._member = Member(torch.device(device))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """From now on loaded tensors wait until their layer is complete."""
        self._names: set[str] = set()
        self._loaded: set[str] | None = set()
        # Loading straight into the layers fails on a CPU, whose kernels have packed their weights.
        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all that the trainer offers. Raises EngineError: the trainer is gone, or the update does not cover the
        model."""
        try:
            if update_info.transport == "safetensors":
                self._load(_of_folder(Path(update_info.folder)))
            elif update_info.transport == "process_group":
                for bucket in self._member.receive(update_info.payload, update_info.timeout):
                    self._load(bucket)
            else:
                for bucket in receive(update_info.payload, update_info.timeout):
                    # A copy: a layer that vLLM pads keeps its tensors to the end, when the shared memory holds others.
                    self._load((name, tensor.clone()) for name, tensor in bucket)
            if missing := [*self._missing_parts(), *self._missing_parameters()]:
                raise EngineError(
                    f"the weight update lacks {len(missing)} tensors of the model, such as {missing[0]!r}"
                )
        except BaseException:
            # Nothing half loaded may wait in the layers for the next update.
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        """Put the layers that waited to the end into place."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group that the trainer's weights came by."""
        self._member.leave()

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        loaded = self.model.load_weights(self._completed(weights))
        if self._loaded is not None:
            self._loaded = None if loaded is None else self._loaded | set(loaded)

    def _completed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """With tied embeddings the matrix under both of its names: vLLM keeps the output's own (packed) copy, which
        would stay old."""
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        for name, tensor in weights:
            # It comes with the embedding below, whether the trainer offers it or not.
            if tied and name == _HEAD:
                continue
            self._names.add(name)
            yield name, tensor
            if tied and name.endswith(_EMBEDDING):
                yield _HEAD, tensor

    def _missing_parts(self) -> Iterator[str]:
        """Tensors that vLLM fuses with others which came (query with key and value, all experts): a fused layer in part
        is garbage."""
        for parts in getattr(self.model, "packed_modules_mapping", {}).values():
            for name in sorted(self._names):
                pieces = name.split(".")
                if len(pieces) > 1 and pieces[-2] in parts:
                    siblings = (".".join([*pieces[:-2], part, pieces[-1]]) for part in parts)
                    yield from (sibling for sibling in siblings if sibling not in self._names)
        experts: dict[str, tuple[set[str], set[str]]] = {}
        for name in self._names:
            if found := _EXPERT.match(name):
                numbers, parts = experts.setdefault(found[1], (set(), set()))
                numbers.add(found[2])
                parts.add(found[3])
        for layer, (numbers, parts) in experts.items():
            # Whole experts that are lacking do not show here, but in `_missing_parameters`.
            every = (f"{layer}.{number}.{part}" for number in sorted(numbers) for part in sorted(parts))
            yield from (name for name in every if name not in self._names)

    def _missing_parameters(self) -> list[str]:
        if self._loaded is None or self.model_config.quantization is not None:
            # vLLM does not say what it loaded, or has parameters that no checkpoint holds.
            return []
        return sorted({name for name, _ in self.model.named_parameters()} - self._loaded)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """vLLM 0.32 packs experts for its CPU kernels when it first builds these, and reads weights that come later
    unpacked: have both done again."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _of_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"no safetensors weights in {folder}")
    for path in files:
        with safe_open(str(path), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                yield name, weights.get_tensor(name)


class WorkerExtension:
    """A base class that vLLM gives its workers; naming it makes every worker import this module. Its methods are called
    by name."""

    def begin_adapters(self: Any, rank: int) -> None:
        """Zeros for the adapters that requests ask for: until others come, the model serves as if it had none."""
        self.remove_lora(adapters.NUMBER)
        request = LoRARequest(adapters.NAME, adapters.NUMBER, adapters.ZEROS)
        self.model_runner.lora_manager.add_dummy_lora(request, rank)
        # It is there already, so its path, which is no folder, is not read.
        self.add_lora(request)

    def load_adapters(self: Any, folder: str) -> list[str]:
        """Put the PEFT adapters in `folder` in the place of those that requests ask for. Returns the modules that got
        none of them here.

        Raises EngineError: vLLM does not take them.
        """
        # vLLM offers no public way to its table of adapted modules.
        manager = self.model_runner.lora_manager._adapter_manager
        known = {
            part
            for name in manager.supported_lora_modules
            for part in manager.packed_modules_mapping.get(name, (name,))
        }
        asked = {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in _of_folder(Path(folder))}
        if asked - known:
            raise EngineError(
                f"vLLM has no adapters for {listed(sorted(asked - known))}. Known: {listed(sorted(known))}."
                f" {_OTHER_TARGET}"
            )
        try:
            self.add_lora(LoRARequest(adapters.NAME, adapters.NUMBER, folder, load_inplace=True))
        except ValueError as error:
            raise EngineError(f"vLLM does not take these adapters ({error}). {_OTHER_TARGET}") from error
        loaded = manager.get_adapter(adapters.NUMBER)
        # vLLM takes adapters for modules that this stage does not hold, and passes over them in silence.
        used = {id(manager._get_lora_layer_weights(loaded, name)) for name in manager.modules}
        return sorted(name for name, weights in loaded.loras.items() if id(weights) not in used)

    def prepare_pipeline(self: Any) -> None:
        """Make room for what comes from the stage before this one, which vLLM does in a warm-up that it leaves out on a
        CPU."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            sizes = {"batch_size": runner.max_num_tokens, "dtype": runner.model_config.dtype, "device": runner.device}
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(**sizes)


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, Receiver)
    if current_platform.is_cpu():
        take_back_draws()
