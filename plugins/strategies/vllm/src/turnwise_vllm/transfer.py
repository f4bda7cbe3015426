"""Inside vLLM's workers: new weights are read, completed, and loaded layer by layer over the old ones.

vLLM imports this module in each worker (as its worker extension) and calls `Receiver` through its weight-transfer interface.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from turnwise.errors import EngineError
from turnwise_torch.broadcast import Member
from turnwise_torch.stream import receive
from turnwise_vllm.arguments import TRANSFER

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed upon before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where to read the weights: by `shared_memory` or `process_group` the `payload` of turnwise_torch.stream or .broadcast, by `safetensors`
    a `folder`. `timeout`: seconds of silence."""

    transport: str = "safetensors"
    payload: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    timeout: float = 600.0


class Receiver(WeightTransferEngine):
    """Reads Hugging Face state-dict names. Refuses an update that does not cover the model: what it left out would keep old or no values."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._member = Member(torch.device(device))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """From now on loaded tensors wait until their layer is complete."""
        self._names: set[str] = set()
        self._loaded: set[str] | None = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all that the trainer offers. Raises EngineError: the trainer is gone, or the update does not cover the model."""
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
                raise EngineError(f"the weight update lacks {len(missing)} tensors of the model, such as {missing[0]!r}")
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
        """With tied embeddings the matrix under both of its names: vLLM keeps the output's own (packed) copy, which would stay old."""
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        for name, tensor in weights:
            if tied and name == _HEAD:
                continue
            self._names.add(name)
            yield name, tensor
            if tied and name.endswith(_EMBEDDING):
                yield _HEAD, tensor

    def _missing_parts(self) -> Iterator[str]:
        """Tensors that vLLM fuses with others which came (query with key and value): a fused layer in part is garbage."""
        for parts in getattr(self.model, "packed_modules_mapping", {}).values():
            for name in sorted(self._names):
                pieces = name.split(".")
                if len(pieces) > 1 and pieces[-2] in parts:
                    siblings = (".".join([*pieces[:-2], part, pieces[-1]]) for part in parts)
                    yield from (sibling for sibling in siblings if sibling not in self._names)

    def _missing_parameters(self) -> list[str]:
        if self._loaded is None or self.model_config.quantization is not None:
            return []  # vLLM does not tell what it loaded, or has parameters that no checkpoint holds
        return sorted({name for name, _ in self.model.named_parameters()} - self._loaded)


def _of_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"no safetensors weights in {folder}")
    for path in files:
        with safe_open(str(path), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                yield name, weights.get_tensor(name)


class WorkerExtension:
    """A base class that vLLM gives its workers; naming it makes every worker import this module."""


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, Receiver)
