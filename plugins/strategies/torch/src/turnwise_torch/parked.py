"""Device memory moved to main memory and back beneath the tensors that live in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from turnwise_torch.base import ModelStrategy
from turnwise_torch.device import has_own_memory, release
from turnwise_torch.guard import names_out_of_memory


class Parked:
    """Memory of tensors in main memory, storage by storage: tensors stay the same objects, and views of one another
    stay views.

    So it needs to know nothing of how an engine lays out its parameters, masters and buffers."""

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """`dropped`: tensors that come back as zeros (gradients)."""
        self._held: list[tuple[UntypedStorage, UntypedStorage | None, int]] = []
        gone = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in dropped}
        here = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
        for place, storage in {**here, **gone}.items():
            # Memory that is not torch's own (a mapped file's) is not its to give back.
            if storage.nbytes() and storage.resizable():
                self._held.append((storage, None if place in gone else _in_main_memory(storage), storage.nbytes()))
                storage.resize_(0)

    def back(self) -> None:
        """Undo it."""
        for storage, copy, size in self._held:
            storage.resize_(size)
            if copy is not None:
                storage.copy_(copy)
            else:
                # resize_ leaves the memory undefined.
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._held = []


class ParkedStrategy(ModelStrategy):
    """A strategy whose tensors on the device stay the same objects while it is elsewhere: an engine holds them, too."""

    _parked: Parked | None = None

    @abstractmethod
    def _movable(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """What is moved, and the gradients, which are dropped; all on the device."""

    @names_out_of_memory("offloading", "move")
    def offload(self) -> None:
        """Move what is on the device to main memory and drop the gradients. Nothing on a CPU, where all is already."""
        if self._parked is not None or not has_own_memory(self.device):
            return
        self._parked = Parked(*self._movable())
        release(self.device)

    @names_out_of_memory("onloading", "move")
    def onload(self) -> None:
        """Move it back."""
        if self._parked is not None:
            self._parked.back()
            self._parked = None


def _in_main_memory(storage: UntypedStorage) -> UntypedStorage:
    """A copy, made straight there: a second one on the device may be what it has no room for. Pinned memory is several
    times as fast."""
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda").untyped_storage()
    copy.copy_(storage)
    return copy
