"""Weights through shared memory: every tensor arrives bit for bit, layers stay whole, and no side waits for ever."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turnwise.errors import EngineError, TrainerError
from turnwise_torch import stream
from turnwise_torch.stream import Bucket, Lines, Sender, buckets, receive


def weights() -> list[tuple[str, Tensor]]:
    made = torch.Generator().manual_seed(0)
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.{i}.{part}" for i in range(12) for part in ("q", "k", "v")),
        "lm_head.weight",
    ]
    kinds = [torch.float32, torch.bfloat16]
    return [(name, torch.randn(3, 5, generator=made).to(kinds[i % 2])) for i, name in enumerate(names)] + [
        ("empty", torch.zeros(0, 4))
    ]


@given(st.integers(1, 2000))
@settings(max_examples=50)
def test_buckets_hold_everything_in_order_within_their_size_and_never_split_a_layer(size: int) -> None:
    made = list(buckets(weights(), size))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in weights()]
    layers: dict[str, int] = {}
    for number, bucket in enumerate(made):
        inside = {name.split(".")[2] for name, _ in bucket if ".layers." in name}
        assert sum(t.nbytes for _, t in bucket) <= size or len(inside) <= 1
        for layer in inside:
            assert layers.setdefault(layer, number) == number


def test_every_receiver_reads_every_tensor_bit_for_bit() -> None:
    sender = Sender(receivers=2, timeout=10)
    found: list[dict[str, Tensor]] = [{}, {}]

    def read(into: dict[str, Tensor]) -> None:
        for bucket in receive(sender.payload, 10):
            into.update((name, tensor.clone()) for name, tensor in bucket)

    readers = [threading.Thread(target=read, args=(into,)) for into in found]
    for reader in readers:
        reader.start()
    sender.send(buckets(weights(), 200))
    for reader in readers:
        reader.join()
    for into in found:
        assert list(into) == [name for name, _ in weights()]
        assert all(torch.equal(into[name], tensor) and into[name].dtype == tensor.dtype for name, tensor in weights())


def _sum_elsewhere(payload: dict[str, str], answer: multiprocessing.Queue[float]) -> None:
    answer.put(sum(float(tensor.double().sum()) for bucket in receive(payload, 20) for _, tensor in bucket))


def test_nothing_has_a_name_in_a_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {path.name for path in Path("/dev/shm").iterdir()}
    sender = Sender(1, 10)
    reader = threading.Thread(target=lambda: list(receive(sender.payload, 10)))
    reader.start()

    def looked() -> Iterator[Bucket]:
        for bucket in buckets(weights(), 200):
            yield bucket
            assert {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("turnwise")} <= before
            assert not list(tmp_path.iterdir())

    sender.send(looked())
    reader.join()


def _send_and_die(payloads: multiprocessing.Queue[dict[str, str]]) -> None:
    sender = Sender(1, 60)
    payloads.put(sender.payload)

    def until_the_second() -> Iterator[Bucket]:
        made = buckets(weights(), 100)
        yield next(made)
        os.kill(os.getpid(), signal.SIGKILL)

    sender.send(until_the_second())


def test_a_sender_that_is_killed_in_the_middle_leaves_nothing_and_is_reported_to_the_reader() -> None:
    context = multiprocessing.get_context("spawn")
    payloads = context.Queue()
    process = context.Process(target=_send_and_die, args=(payloads,))
    process.start()
    payload = payloads.get(timeout=60)
    reading = receive(payload, 30)
    assert [name for name, _ in next(reading)] == [weights()[0][0]]
    began = time.monotonic()
    with pytest.raises(EngineError, match="the trainer stopped sending") as caught:
        next(reading)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 10
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    assert payload["socket"] not in Path("/proc/net/unix").read_text()
    assert payload["socket"] not in "".join(_open_files())
    with pytest.raises(EngineError, match="is gone"):
        next(receive(payload, 1))


def _open_files() -> Iterator[str]:
    """What this process holds open, or has mapped."""
    yield Path("/proc/self/maps").read_text()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            yield os.readlink(link)


def test_a_process_of_another_user_gets_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # A test has no second user to run a process as.
    monkeypatch.setattr(stream, "_same_user", lambda connection: False)
    sender = Sender(1, 0.5)
    reader = threading.Thread(target=_read_until_the_end, args=(sender.payload,))
    reader.start()
    with pytest.raises(TrainerError, match="0 of 1 backends came"):
        sender.send(buckets(weights(), 200))
    reader.join(10)


def test_the_user_of_the_other_side_is_known() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    # As above: what is known of the other side shows in nothing else while there is one user.
    assert stream._same_user(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4_000_000)
        assert stream._same_user(one) is (os.getuid() == 0)
    one.close()
    other.close()


def test_another_process_reads_them() -> None:
    context = multiprocessing.get_context("spawn")
    sender, answer = Sender(1, 60), context.Queue()
    reader = context.Process(target=_sum_elsewhere, args=(sender.payload, answer))
    reader.start()
    sender.send(buckets(weights(), 100))
    assert answer.get(timeout=60) == pytest.approx(sum(float(t.double().sum()) for _, t in weights()))
    reader.join()


def test_a_sender_without_a_reader_gives_up_in_time() -> None:
    with pytest.raises(TrainerError, match="0 of 1 backends came"):
        Sender(1, 0.05).send(iter([weights()]))


def test_a_reader_that_goes_away_ends_the_sending() -> None:
    sender = Sender(1, 10)

    def read_one() -> None:
        reading = receive(sender.payload, 10)
        next(reading)
        reading.close()  # type: ignore[attr-defined]

    reader = threading.Thread(target=read_one)
    reader.start()
    with pytest.raises(TrainerError, match="stopped reading"):
        sender.send(buckets(weights(), 64))
    reader.join()


def test_a_sender_that_fails_ends_the_reading() -> None:
    sender = Sender(1, 10)

    def broken() -> list[Bucket]:
        raise RuntimeError("no weights")
        yield []

    def send() -> None:
        with pytest.raises(RuntimeError, match="no weights"):
            sender.send(broken())

    writer = threading.Thread(target=send)
    writer.start()
    with pytest.raises(EngineError, match="stopped sending"):
        list(receive(sender.payload, 10))
    writer.join()


def test_who_hung_up_is_known_in_a_process_with_many_open_files() -> None:
    high = 2000
    if (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) <= high:
        pytest.skip(f"a process may open {limit} files here (ulimit -n)")
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, high)) as numbered:
        line = Lines(numbered, 1.0)
        assert not line.gone
        theirs.sendall(b"{}\n")
        assert not line.gone
        assert line.read() == {}
        theirs.close()
        assert line.gone
        line.close()


def test_an_offer_that_is_gone_is_reported() -> None:
    sender = Sender(1, 1)
    sender.close()
    sender.close()
    with pytest.raises(EngineError, match="is gone"):
        next(receive(sender.payload, 1))


def test_a_host_without_room_in_its_shared_memory_is_reported_before_a_byte_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing to memory that the system cannot give ends a process by a signal."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender = Sender(receivers=1, timeout=10)
    reader = threading.Thread(target=_read_until_the_end, args=(sender.payload,))
    reader.start()
    with pytest.raises(
        TrainerError, match=r"no shared memory for a bucket of \d+ MB .*Fix: .*model_update_buffer_size_mb"
    ):
        sender.send(buckets(weights(), 10**6))
    reader.join(10)


def _read_until_the_end(payload: dict[str, str]) -> None:
    with pytest.raises(EngineError):
        list(receive(payload, 10))
