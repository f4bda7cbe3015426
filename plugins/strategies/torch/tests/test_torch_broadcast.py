"""Broadcasts in a group of their own: what is sent arrives, the group lasts, and every partner that fails ends the
update in one error."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.errors import EngineError, TrainerError
from turnwise.testing.compare import says
from turnwise_torch.broadcast import Broadcast, Call, Hub, Member
from turnwise_torch.stream import buckets

pytestmark = pytest.mark.timeout(90)
CPU = torch.device("cpu")
Named = list[tuple[str, Tensor]]


def named(add: float = 0.0) -> Named:
    layers = [
        (f"model.layers.{n}.{part}.weight", torch.full((3, n + 1), n + add)) for n in range(3) for part in ("a", "b")
    ]
    return [
        ("embed.weight", torch.arange(6, dtype=torch.bfloat16) + add),
        ("scalar", torch.tensor(add)),
        ("ids", torch.arange(4)),
        *layers,
    ]


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("", CPU, 20.0)
    yield hub
    hub.close()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    members = [Member(CPU), Member(CPU)]
    yield members
    for member in members:
        member.leave()


def update(sender: Broadcast, offered: Any, members: Sequence[Member], timeout: float = 20.0) -> list[Any]:
    """What the sender's work gave (None) and what each member read, exceptions among them."""

    def read(member: Member) -> Named:
        return [pair for bucket in member.receive(sender.payload, timeout) for pair in bucket]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        work = [
            threads.submit(sender.send, buckets(offered, 40)),
            *(threads.submit(read, member) for member in members),
        ]
        return [one.exception() or one.result() for one in work]


def arrived(received: Any, sent: Named) -> bool:
    return [(name, tensor.tolist(), tensor.dtype) for name, tensor in received] == [
        (name, tensor.tolist(), tensor.dtype) for name, tensor in sent
    ]


def test_every_receiver_gets_every_tensor_and_the_group_lasts(hub: Hub, members: list[Member]) -> None:
    names = []
    for add in (0.0, 100.0):
        error, *received = update(hub.sender(2), named(add), members)
        assert error is None
        assert all(arrived(one, named(add)) for one in received)
        names.append(hub.name)
    assert names[0] == names[1]
    assert not torch.distributed.is_initialized(), "the default group is the engine's own"


def test_another_set_of_receivers_makes_another_group(hub: Hub, members: list[Member]) -> None:
    update(hub.sender(2), named(), members)
    before = hub.name
    for receivers in ([members[0]], [members[1], Member(CPU)], members):
        error, *received = update(hub.sender(len(receivers)), named(1.0), receivers)
        assert error is None
        assert all(arrived(one, named(1.0)) for one in received)
        assert hub.name != before
        before = hub.name


def test_a_trainer_that_fails_is_reported_at_once_and_the_next_update_arrives(hub: Hub, members: list[Member]) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from named()[:-1]
        raise ValueError("no memory for the rest")

    update(hub.sender(2), named(), members)
    begun = time.monotonic()
    error, *received = update(hub.sender(2), broken(), members)
    assert isinstance(error, ValueError), "the trainer's own error, not one about the transport"
    assert all(isinstance(one, EngineError) and "the trainer stopped sending" in str(one) for one in received)
    assert time.monotonic() - begun < 5
    error, *received = update(hub.sender(2), named(), members)
    assert error is None
    assert all(arrived(one, named()) for one in received)


def test_a_receiver_that_stops_in_the_midst_ends_the_update(hub: Hub, members: list[Member]) -> None:
    sender = hub.sender(2)

    def read_one() -> None:
        reading = members[1].receive(sender.payload, 20.0)
        next(reading)
        reading.close()  # type: ignore[attr-defined]

    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        stopped = threads.submit(read_one)
        error, received = update(sender, named(), members[:1])
        stopped.result()
    assert isinstance(error, TrainerError)
    assert "2 of 2 backends came, and one stopped reading the weights" in str(error)
    assert isinstance(received, EngineError)
    assert time.monotonic() - begun < 10
    error, *received = update(hub.sender(2), named(), members)
    assert error is None


def test_an_absent_receiver_ends_the_update_in_time(members: list[Member]) -> None:
    hub = Hub("", CPU, 1.0)
    begun = time.monotonic()
    error, received = update(hub.sender(2), named(), members[:1])
    assert isinstance(error, TrainerError)
    says(str(error), "1 of 2 backends came", "did not join or read the weights", "weight_sync_timeout = 1 s")
    assert isinstance(received, EngineError)
    assert time.monotonic() - begun < 8
    hub.close()


def test_a_receiver_that_never_joins_the_group_ends_the_update_in_time(members: list[Member]) -> None:
    hub = Hub("", CPU, 1.0)
    sender = hub.sender(2)
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        idle = threads.submit(lambda: Call(sender.payload, 20.0))
        error, received = update(sender, named(), members[:1])
        idle.result().close()
    assert isinstance(error, TrainerError)
    assert "2 of 2 backends came" in str(error)
    assert isinstance(received, EngineError)
    assert time.monotonic() - begun < 8
    hub.close()


def test_strangers_are_sent_away(hub: Hub, members: list[Member]) -> None:
    sender = hub.sender(1)
    place = (sender.payload["host"], sender.payload["port"])
    strangers = []
    for said in (
        b"GET / HTTP/1.1\r\n",
        json.dumps({"token": "guessed", "ranks": 1, "holds": "", "device": "cpu"}).encode() + b"\n",
        b'{"token": "\\ud800"}\n',
    ):
        strangers.append(socket.create_connection(place, 5))
        strangers[-1].sendall(said)
    error, received = update(sender, named(), members[:1])
    assert error is None
    assert arrived(received, named())
    for stranger in strangers:
        stranger.settimeout(5)
        assert not stranger.recv(1)
        stranger.close()


def test_an_offer_that_is_gone_is_reported_where_it_was(hub: Hub) -> None:
    sender = hub.sender(1)
    sender.close()
    with pytest.raises(
        EngineError,
        match=rf"the trainer's offer at 127\.0\.0\.1:{sender.payload['port']} is gone, or cannot be reached",
    ):
        next(Member(CPU).receive(sender.payload, 5.0))


def test_receivers_on_other_hosts_find_the_host_where_the_roles_processes_meet() -> None:
    for address, host in (
        ("localhost:1234", "localhost"),
        ("", "127.0.0.1"),
    ):  # without other processes nothing listens outside this host
        sender = Hub(address, CPU, 1.0).sender(1)
        assert sender.payload["host"] == host
        sender.close()
