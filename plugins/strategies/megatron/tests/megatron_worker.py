"""One rank of a group that a test starts: does what a job says, case after case, and writes what came of it."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve

from turnwise.contracts.train import Ranks, TrainContext
from turnwise.data.dealing import deal
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import TurnwiseError
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.strategy import MegatronStrategy
from turnwise_torch.objective import build_loss
from turnwise_torch.stream import receive
from turnwise_torch.testing import collective_timeouts, weights_of


def share(rows: Rows, strategy: MegatronStrategy) -> Rows:
    rank, size = strategy.data_parallel
    return rows.select(deal(rows, size)[rank])


def updated(strategy: MegatronStrategy, updates: list[Update]) -> list[UpdateResult]:
    return [strategy.update(evolve(update, rows=share(update.rows, strategy))) for update in updates]


def skipped(strategy: MegatronStrategy, update: Update) -> tuple[UpdateResult, bool]:
    """What an update reports for which the last data parallel rank alone has a loss that is not finite, and whether the
    weights stay."""
    before, rows = weights_of(strategy), share(update.rows, strategy)
    rank, size = strategy.data_parallel
    if rank == size - 1:
        rows = evolve(rows, columns={**rows.columns, "advantages": np.full(len(rows.columns["coef"]), np.nan)})
    result = strategy.update(evolve(update, rows=rows))
    return result, all(torch.equal(tensor, before[name]) for name, tensor in weights_of(strategy).items())


def sent(strategy: MegatronStrategy) -> dict[str, torch.Tensor]:
    """The weights as a backend receives them."""
    got: dict[str, torch.Tensor] = {}
    offer = strategy.offer("shared_memory", 3)

    def read() -> None:
        for bucket in receive(offer.payload, 30):
            got.update({name: tensor.clone() for name, tensor in bucket})

    reader = threading.Thread(target=read)
    if strategy.context.ranks.rank == 0:
        reader.start()
    strategy.send(offer)
    if strategy.context.ranks.rank == 0:
        reader.join(30)
    return got


def run(case: dict[str, Any], rank: int, size: int, folder: Path) -> dict[str, Any]:
    config = MegatronConfig(**case.get("config", {}))
    contexts: list[TrainContext] = [
        evolve(case["context"], ranks=Ranks(rank, size, rank, f"127.0.0.1:{port}")) for port in case["ports"]
    ]
    context = contexts[0]
    strategy = MegatronStrategy(config, context)
    reported: dict[str, Any] = {"data_parallel": strategy.data_parallel, "weights": weights_of(strategy)}
    reported["waits"] = set(collective_timeouts())
    given = case["updates"]
    if "rows" in case:
        ask = strategy.values if context.head == "value" else strategy.logprobs
        reported["before"] = ask(share(case["rows"], strategy))
    if case.get("broken"):  # the updates that follow are as if it had not been
        reported["skipped"] = skipped(strategy, given[0])
    reported["results"] = updated(strategy, given[:3])
    reported["objectives"] = {}
    for name, objective in case.get(
        "objectives", {}
    ).items():  # one group for all of them: its port may be another's by now
        strategy.context, strategy.loss = evolve(strategy.context, objective=objective), build_loss(objective)
        reported["objectives"][name] = updated(strategy, case["silent"])
    if case.get("resume"):
        strategy.save(folder / "state")
    reported["results"] += updated(strategy, given[3:])
    reported["after"] = weights_of(strategy)
    if case.get("sent"):
        reported["sent"] = sent(strategy)
    if case.get("exported"):
        strategy.export(folder / "export")
    strategy.close()
    if case.get("resume"):
        again = MegatronStrategy(config, contexts[1])
        updated(again, given[:1])
        again.load(folder / "state")
        reported["resumed"] = updated(again, given[3:])
        reported["resumed_weights"] = weights_of(again)
        again.close()
        other = MegatronStrategy(MegatronConfig(**case["other"]), contexts[2])
        try:
            other.load(folder / "state")
        except TurnwiseError as error:
            reported["refused"] = str(error)
        other.close()
    return reported


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cases = pickle.loads((folder / "cases.pkl").read_bytes())
    reported = {}
    for name, case in cases.items():
        (folder / name).mkdir(exist_ok=True)
        reported[name] = run(case, rank, size, folder / name)
    (folder / f"reported-{rank}.pkl").write_bytes(pickle.dumps(reported))


if __name__ == "__main__":
    main()
