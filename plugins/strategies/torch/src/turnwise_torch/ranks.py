"""The processes of one training role: they meet at an address, and agree on numbers."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from turnwise.contracts.train import Ranks


class ProcessGroup:
    """torch's default process group of the role: NCCL on GPUs, gloo on the CPU. One process has none and agrees with
    itself.

    `timeout`: the seconds that a rank waits for the others to come, and in any collective for them to answer."""

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float) -> None:
        self.ranks, self._device = ranks, device
        self._joined = False
        if ranks.size > 1:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                # gloo beside NCCL: `largest` and broadcast objects exchange what lies on the CPU.
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                init_method=f"tcp://{ranks.address}",
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=timedelta(seconds=timeout),
            )
            self._joined = True

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each number over all ranks."""
        if not self._joined:
            return list(numbers)
        held = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return [int(number) for number in held]

    def close(self) -> None:
        """Leave; may be called twice."""
        if self._joined:
            dist.destroy_process_group()
            self._joined = False


def limit_waits(timeout: float) -> None:
    """Let every collective of this process wait up to `timeout` seconds, also in groups that a library made with
    torch's own limit."""
    # torch has no public list of its groups.
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
