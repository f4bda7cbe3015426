"""Two nodes of Ray's own test cluster on this machine: where roles go, how weights get from node to node, and the loss
of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

import ray
import torch

from turnwise.errors import EngineError, MachineError, TrainerError
from turnwise.testing.synthetic import training_rows
from turnwise_ray.actors import process
from turnwise_ray.cluster import Cluster
from turnwise_ray.config import RayConfig

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Any, Any]]:
    """(the cluster, its second node); two CPUs each, and the driver on the first."""
    from ray.cluster_utils import Cluster as TestCluster

    cluster = TestCluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False},
    )
    second = cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_devices_fill_a_node_before_the_next_and_a_cluster_that_is_too_small_is_reported(
    nodes: Any,
) -> None:
    async def work() -> None:
        seats = await cluster.seats("actor_train", (0, 1))
        assert len({seat.node for seat in seats}) == 1
        others = await cluster.seats("actor_infer", (2, 3))
        assert {seat.node for seat in others}.isdisjoint({seat.node for seat in seats})
        assert await cluster.seats("critic", (1, 2)) == [seats[1], others[0]]
        with pytest.raises(
            MachineError, match="reference: 8 processes need 8 CPU beside 4 of the other roles, the cluster has 4"
        ):
            await cluster.seats("reference", tuple(range(10, 18)))
        with pytest.raises(
            MachineError, match=r"reference: 1 process.* 1 CPU beside 4 of the other roles, the cluster has 4"
        ):
            await cluster.seats("reference", (20,))

    async def closing() -> None:
        try:
            await work()
        finally:
            await cluster.close()

    cluster = Cluster(RayConfig(device="cpu", start_timeout=120))
    asyncio.run(closing())


def test_weights_pass_from_node_to_node_as_they_are(nodes: Any) -> None:
    """The source reads a stream on the first node, the sink serves it on the second; both are processes of their
    own."""
    from turnwise_ray.relay import RelaySink, RelaySource
    from turnwise_torch.stream import Sender, buckets, receive

    weights = [
        ("model.embed.weight", torch.randn(5, 3)),
        ("model.layers.0.a", torch.randn(4, 4).to(torch.bfloat16)),
        ("model.layers.1.a", torch.arange(6)),
        ("scale", torch.tensor(2.5)),
        ("empty", torch.empty(0, 3)),
    ]
    here, there = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    source = process(RelaySource, "source", Cluster.on_node(here))
    sink = process(RelaySink, "sink", Cluster.on_node(there))
    assert [ray.get(actor.node.remote())[0] for actor in (source, sink)] == [here, there]
    sender = Sender(1, 30.0)
    ray.get(source.open.remote(sender.payload, 30.0)).unwrap("source", EngineError)
    payload = ray.get(sink.open.remote(1, 30.0)).unwrap("sink", EngineError)

    async def all_three() -> list[tuple[str, Any]]:
        pumped = sink.pump.remote(source)
        sent = asyncio.to_thread(sender.send, buckets(weights, 64))
        read = asyncio.to_thread(
            lambda: [(name, tensor.clone()) for bucket in receive(payload, 30.0) for name, tensor in bucket]
        )
        _, got = await asyncio.gather(sent, read)
        (await pumped).unwrap("sink", EngineError)
        return got

    got = asyncio.run(all_three())
    assert [name for name, _ in got] == [name for name, _ in weights]
    for (_, one), (name, other) in zip(got, weights, strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    for actor in (source, sink):
        ray.kill(actor)


def test_the_loss_of_a_node_is_reported_by_the_rank_that_was_there(nodes: Any, place: Any, trainer: Any) -> None:
    cluster, second = nodes

    async def work(runtime: Any) -> None:
        role = await runtime.train(trainer((0, 1, 2)))  # two on one node, one on the other
        assert len(await role.logprobs(training_rows())) > 0
        await asyncio.to_thread(cluster.remove_node, second)
        with pytest.raises(TrainerError, match=r"actor_train, rank \d of 3 on \S+: the process died in logprobs\."):
            await asyncio.wait_for(role.logprobs(training_rows()), 120)

    place(work)
