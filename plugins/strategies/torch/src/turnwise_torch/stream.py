"""Weights from a trainer to samplers on the same host: bucket by bucket through one block of shared memory.

The sender listens on a unix socket, every receiver connects and is handed the memory. For each bucket the sender writes
its tensors there and sends every receiver names, dtypes, shapes and places as one line of JSON; it goes on when all
have answered. So no more than one bucket exists beside the two models, and any process of the same user on the host can
read, whoever started it.

Neither memory nor socket has a name in a file system (memfd_create, Linux's abstract sockets), so that nothing is left
when a side is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import select
import socket
import struct
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import EngineError, TrainerError

Bucket = list[tuple[str, Tensor]]
"""Tensors under their Hugging Face names."""

# Decoder layers, and a vision tower's blocks, as transformers names them: model.layers.3., visual.blocks.3.,
# transformer.h.3.
_LAYER = re.compile(r"^(.*?\b(?:layers|blocks|h)\.\d+)\.")
# Bytes: a cache line, and a multiple of every dtype's item.
_ALIGNMENT = 64
_CREDENTIALS = struct.Struct("3i")
"""Linux's `ucred`: process, user and group of the other side of a unix socket."""


def buckets(named: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """`named` tensors in buckets of at most `size` bytes, in order. A decoder layer is never split: one larger than
    `size` goes alone.

    Engines fuse parts of a layer (query, key and value; gate and up) and need them together.
    """
    bucket: Bucket = []
    filled = 0
    for unit in units(named):
        bytes_ = sum(tensor.nbytes for _, tensor in unit)
        if bucket and filled + bytes_ > size:
            yield bucket
            bucket, filled = [], 0
        bucket += unit
        filled += bytes_
    if bucket:
        yield bucket


def units(named: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """`named` tensors in order, those of a decoder layer that follow each other together, every other one alone."""
    unit: Bucket = []
    layer: str | None = None
    for name, tensor in named:
        found = _LAYER.match(name)
        belongs = found.group(1) if found else None
        if unit and (belongs is None or belongs != layer):
            yield unit
            unit = []
        unit.append((name, tensor))
        layer = belongs
    if unit:
        yield unit


class Sender:
    """The trainer's side. `payload` goes into the offer; `send` serves `receivers` readers, each wait at most `timeout`
    seconds long."""

    def __init__(self, receivers: int, timeout: float) -> None:
        self._receivers, self._timeout = receivers, timeout
        name = f"turnwise-weights-{uuid.uuid4().hex}"
        self._memory, self._size = open(os.memfd_create(name), "r+b", buffering=0), 0  # noqa: SIM115 - until `close`
        self._listener = socket.socket(socket.AF_UNIX)
        # The leading zero byte means Linux's abstract namespace: no file, and gone with its last user.
        self._listener.bind(f"\0{name}")
        self._listener.listen(receivers)
        self.payload: dict[str, Any] = {"socket": name}

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Stream all buckets to all receivers, then close. Raises TrainerError: a receiver did not come, answer or go
        on reading in time."""
        lines: list[Lines] = []
        try:
            # One deadline for all to come, not a fresh one after each.
            deadline = time.monotonic() + self._timeout
            while len(lines) < self._receivers:
                # A timeout of 0 would make the socket non-blocking, and a late receiver a BlockingIOError.
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                connection = self._listener.accept()[0]
                if not _same_user(connection):  # whoever may look into the weights
                    connection.close()
                    continue
                lines.append(Lines(connection, self._timeout))
                # A descriptor travels only beside at least one byte.
                socket.send_fds(connection, [b"\n"], [self._memory.fileno()])
            for bucket in buckets:
                # All are told before any answer is awaited, so that they read at the same time; and all have answered
                # before the next bucket overwrites the memory.
                message = {"tensors": self._write(bucket)}
                for line in lines:
                    line.write(message)
                for line in lines:
                    line.read()
            for line in lines:
                line.write({"tensors": None})
            for line in lines:
                line.read()
        except (OSError, EOFError) as error:
            what = (
                "did not read the weights in time" if isinstance(error, TimeoutError) else "stopped reading the weights"
            )
            raise TrainerError(
                f"weight update: {len(lines)} of {self._receivers} backends came, and one {what} (weight_sync_timeout"
                f" {self._timeout:g} s)"
            ) from error
        finally:
            for line in lines:
                line.close()
            self.close()

    def _write(self, bucket: Bucket) -> list[Any]:
        places, end = [], 0
        for _, tensor in bucket:
            places.append(end)
            end += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        if self._size < end:
            self._enlarge(end)
        # A bucket of empty tensors alone needs no memory, and a file of no bytes cannot be mapped.
        memory = mmap.mmap(self._memory.fileno(), self._size) if end else None
        for (_, tensor), place in zip(bucket, places, strict=True):
            if memory is not None and tensor.numel():
                _view(memory, place, tensor.dtype, tensor.shape).copy_(tensor.detach())
        return [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), place]
            for (name, t), place in zip(bucket, places, strict=True)
        ]

    def _enlarge(self, size: int) -> None:
        """Have the memory before it is written to: what is missing then ends the process by a signal."""
        try:
            os.posix_fallocate(self._memory.fileno(), 0, size)
        except OSError as error:
            raise TrainerError(
                f"weight update: no shared memory for a bucket of {math.ceil(size / 2**20)} MB ({error.strerror}). "
                "Fix: lower model_update_buffer_size_mb, or give the machine (or the container) more memory"
            ) from error
        self._size = size

    def close(self) -> None:
        """Withdraw the offer and free the shared memory, once no receiver holds it; may be called twice."""
        self._listener.close()
        self._memory.close()


def receive(payload: Mapping[str, Any], timeout: float) -> Generator[Bucket, None, None]:
    """The sender's buckets, one after the other. Tensors are CPU views of shared memory, valid until the next one is
    asked for.

    Raises EngineError: the sender is gone or was silent for `timeout` seconds. Ending the iteration early ends the
    sender's work too.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout)
    try:
        connection.connect(f"\0{payload['socket']}")
    except OSError as error:
        connection.close()
        raise EngineError(
            f"weight update: the trainer's offer {payload['socket']} is gone ({error}). Both must run on one host"
        ) from error
    lines, memory = Lines(connection, timeout), -1
    try:
        while True:
            try:
                memory = _handed(connection) if memory < 0 else memory
                described = lines.read()["tensors"]
                if described is None:
                    lines.write({})
                    return
            except (OSError, EOFError) as error:
                raise EngineError(
                    "weight update: the trainer stopped sending, or was silent for too long (weight_sync_timeout)"
                ) from error
            # The answer follows when the caller asks for the next bucket, which overwrites the memory of this one.
            yield _read(memory, described)
            lines.write({})
    finally:
        lines.close()
        if memory >= 0:
            os.close(memory)


def _same_user(connection: socket.socket) -> bool:
    """Whether the other side runs as this user, or as root. Any process of the host can connect to a socket without a
    file."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] in (os.geteuid(), 0)


def _handed(connection: socket.socket) -> int:
    """The file descriptor that the sender hands over first. Raises OSError or EOFError."""
    # One byte and no more: what follows is the first line, which is read through a buffer.
    descriptors = socket.recv_fds(connection, 1, 1)[1]
    if not descriptors:
        raise EOFError
    return descriptors[0]


def _read(memory: int, described: Sequence[Any]) -> Bucket:
    # Mapped again for every bucket, as the sender may have enlarged the memory; a file of no bytes cannot be mapped.
    mapped = mmap.mmap(memory, 0) if any(0 not in shape for _, _, shape, _ in described) else None
    return [
        (name, _view(mapped, place, getattr(torch, dtype), torch.Size(shape)))
        for name, dtype, shape, place in described
    ]


def _view(memory: mmap.mmap | None, place: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    # torch.frombuffer refuses a count of 0.
    if memory is None or not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=place).view(shape)


class Lines:
    """JSON, one object a line, on a connected socket. `write` and `read` raise OSError or, where the other side hung
    up, EOFError."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        self._connection = connection
        self._file = connection.makefile("rwb")

    def patience(self, timeout: float) -> None:
        """From now on so many seconds for one line."""
        self._connection.settimeout(timeout)

    @property
    def gone(self) -> bool:
        """Whether the other side hung up, without waiting."""
        look = select.poll()  # select.select knows no descriptor above 1023
        look.register(self._connection, select.POLLIN)
        if not look.poll(0):
            return False
        try:
            # Readable means a line or the end: a look at the next byte tells which, and leaves it to `read`.
            return not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def write(self, message: Mapping[str, Any]) -> None:
        """Send one object."""
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def read(self) -> Any:
        """Wait for one object."""
        line = self._file.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        """Hang up; a thread that waits for a line learns of it."""
        with contextlib.suppress(OSError):  # the other side is gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        # The other side is gone with bytes unsent.
        with contextlib.suppress(OSError):
            self._file.close()
        self._connection.close()
