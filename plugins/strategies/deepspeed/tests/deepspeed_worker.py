"""One rank of a group that a test starts: does what a job says, case after case, and writes what came of it."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from attrs import evolve
from deepspeed_cases import context, run_updates
from safetensors.torch import load_file

from turnwise.contracts.train import Ranks
from turnwise.data.dealing import deal
from turnwise.data.rows import Rows, Update
from turnwise.errors import TurnwiseError
from turnwise_deepspeed.strategy import DeepspeedStrategy
from turnwise_torch import base, lora
from turnwise_torch.broadcast import Member
from turnwise_torch.objective import build_loss
from turnwise_torch.stream import receive
from turnwise_torch.testing import collective_timeouts, weights_of


class OneGroup(base.ProcessGroup):
    """The group of this process, joined once and kept: a rank of a run has one role, this one has many after
    another."""

    joined = False

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float) -> None:
        if OneGroup.joined:
            self.ranks, self._device, self._joined = ranks, device, True
        else:
            super().__init__(ranks, device, timeout)
            OneGroup.joined = True

    def close(self) -> None:
        """Stay."""


def share(rows: Rows, ranks: Ranks) -> Rows:
    """This rank's samples."""
    return rows.select(deal(rows, ranks.size)[ranks.rank])


def received(strategy: DeepspeedStrategy, transport: str = "shared_memory") -> dict[str, torch.Tensor]:
    """The weights as a backend gets them; on rank 0 alone."""
    got: dict[str, torch.Tensor] = {}
    offer = strategy.offer(transport, 3)
    if transport == "safetensors":
        return (
            load_file(Path(offer.payload["folder"]) / lora.ADAPTER_WEIGHTS) if strategy.context.ranks.rank == 0 else {}
        )
    stream = receive if transport == "shared_memory" else Member(torch.device("cpu")).receive

    def read() -> None:
        for bucket in stream(offer.payload, 60):
            got.update({name: tensor.clone() for name, tensor in bucket})

    reader = threading.Thread(target=read)
    if strategy.context.ranks.rank == 0:
        reader.start()
    strategy.send(offer)
    if strategy.context.ranks.rank == 0:
        reader.join(60)
    return got


def case(job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Build the strategy, load, update, save, export, offer: whatever the case names."""
    strategy = DeepspeedStrategy(job["config"], context(job["model"], ranks=ranks, **job.get("context", {})))
    out: dict[str, Any] = {}
    if hasattr(next(strategy.model.parameters()), "ds_tensor"):
        out["held"] = [(p.ds_tensor.numel(), p.ds_numel) for p in strategy.model.parameters()]
    try:
        if "load" in job:
            strategy.load(job["load"])
        mine: list[Update] = [evolve(update, rows=share(update.rows, ranks)) for update in job.get("updates", ())]
        if "broken" in job and ranks.rank == 1:  # of two ranks the second alone has a loss that is not finite
            first = mine[0]
            columns = {**first.rows.columns, "advantages": np.full(len(first.rows.columns["coef"]), np.nan)}
            mine[0] = evolve(first, rows=evolve(first.rows, columns=columns))
        out["results"] = run_updates(strategy, mine) if mine and "objectives" not in job else []
        for name, objective in job.get("objectives", {}).items():
            strategy.context, strategy.loss = evolve(strategy.context, objective=objective), build_loss(objective)
            out[name] = run_updates(strategy, mine)
        if "save" in job:
            strategy.save(job["save"])
            out["after"] = run_updates(strategy, mine)
        if "log_probs" in job:
            infer = strategy.values if job.get("context", {}).get("head") == "value" else strategy.logprobs
            out["log_probs"] = infer(share(job["log_probs"], ranks))
        out["noise"] = torch.rand(2)
        out["waits"] = collective_timeouts()
        if job.get("weights", True):
            out["weights"] = weights_of(strategy)
        if job.get("received"):
            out["received"] = received(strategy)
        if job.get("alone"):
            out["alone"] = {
                transport: received(strategy, transport)
                for transport in strategy.transports(strategy.config, strategy.context)
            }
            out["adapter"] = strategy.offer("safetensors", 4).adapter
        if "export" in job:
            strategy.export(job["export"])
        if "held" in out:
            out["gathered"] = sum(p.ds_status.name != "NOT_AVAILABLE" for p in strategy.model.parameters())
    except TurnwiseError as error:
        out["error"] = str(error)
    strategy.close()
    return out


def main(folder: Path, rank: int, size: int, address: str) -> None:
    """All cases of the job."""
    torch.set_num_threads(1)
    base.ProcessGroup = OneGroup  # type: ignore[misc]
    jobs = pickle.loads((folder / "job").read_bytes())
    gc.freeze()
    warnings.simplefilter("error")
    results = {}
    for name, job in jobs.items():
        print(name, round(time.perf_counter(), 1), flush=True)
        results[name] = case(job, Ranks(rank, size, rank, address))
    (folder / f"result-{rank}").write_bytes(pickle.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
