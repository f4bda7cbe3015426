"""Weights from a trainer straight to samplers' processes: broadcasts in a torch.distributed group of their own, gloo on
CPUs and NCCL on GPUs.

The sender listens on a TCP port. Every receiver connects, says how many processes it stands for and which group they
are in already, and is given the group of this update. For each bucket the sender writes names, dtypes and shapes as one
line of JSON, then broadcasts its tensors one by one, and goes on when all receivers have answered. The group is kept
from update to update; where other processes come, or an update failed, a new one is made. The default process group of
neither side is touched.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.errors import EngineError, TrainerError
from turnwise_torch.grouping import abort, bound, broadcast_within, group_of, meeting, watched
from turnwise_torch.guard import is_out_of_memory
from turnwise_torch.stream import Bucket, Lines

_GREETING = 10.0
"""Seconds in which whoever connects has to say who it is; another may wait behind it."""


class Hub:
    """The trainer's end: its address, a store where processes meet, and the group of the last update."""

    def __init__(self, address: str, device: torch.device, timeout: float) -> None:
        """`address`: "host:port" of the role's processes; its host is where receivers find this one. Without it: this
        host alone."""
        self.host = address.rpartition(":")[0].strip("[]") or "127.0.0.1"
        self.device, self.timeout = device, timeout
        self._name, self._backend = "", "gloo"
        self._size = self._port = 0
        self._group: Any = None
        self._store: Any = None

    @property
    def name(self) -> str:
        """The group's, "" before the first update."""
        return self._name

    def sender(self, receivers: int) -> Broadcast:
        """One update's sender."""
        return Broadcast(self, receivers)

    def assign(self, greetings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answer to each receiver: the group that all of them are in, else a new one with this process as rank
        0."""
        size = 1 + sum(greeting["ranks"] for greeting in greetings)
        # A receiver that was started anew holds no group, and a group's size is fixed: one stranger needs a new one.
        kept = (
            self._group is not None
            and self._size == size
            and all(greeting["holds"] == self._name for greeting in greetings)
        )
        if not kept:
            self.drop()
            # NCCL needs a GPU at every end; a sampler on CPUs beside a trainer on a GPU still meets it over gloo.
            nccl = self.device.type == "cuda" and all(greeting["device"] == "cuda" for greeting in greetings)
            # The store outlives a group, and the keys of an aborted one stay in it: every group has a name of its own.
            self._name, self._size, self._backend = f"turnwise-{secrets.token_hex(8)}", size, "nccl" if nccl else "gloo"
        # Rank 0 is the sender. A receiver may stand for several processes (tensor parallel engines): their ranks follow
        # on each other.
        assigned, rank = [], 1
        for greeting in greetings:
            assigned.append({**self._facts(rank), "new": self._group is None})
            rank += greeting["ranks"]
        return assigned

    def _facts(self, rank: int) -> dict[str, Any]:
        if self._store is None:
            # Bound here and handed over: by itself the store would listen on every interface, not on this host's alone.
            listener = bound(self.host)
            self._port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                self.host,
                self._port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.timeout),
                master_listen_fd=listener.detach(),
            )
        return {
            "name": self._name,
            "host": self.host,
            "port": self._port,
            "rank": rank,
            "size": self._size,
            "backend": self._backend,
        }

    def join(self, lines: Sequence[Lines]) -> None:
        """Meet the receivers in the new group, if there is one."""
        if self._group is None:
            facts, store = self._facts(0), self._store
            self._group = watched(lambda: group_of(facts, store, self.host, self.timeout), lines, self.timeout)

    def broadcast(self, tensors: Sequence[Tensor], lines: Sequence[Lines]) -> None:
        """Send tensors to all."""
        # Broadcasts want contiguous memory, and gloo wants it on the CPU.
        device = self.device if self._backend == "nccl" else torch.device("cpu")
        broadcast_within(
            self._group, [tensor.detach().to(device).contiguous() for tensor in tensors], device, lines, self.timeout
        )

    def drop(self) -> None:
        """Leave the group: the next update makes another."""
        group, self._group = self._group, None
        abort(group)

    def close(self) -> None:
        """Leave the group and end the store; may be called twice."""
        self.drop()
        self._store = None


class Broadcast:
    """The sender of one update, as turnwise_torch.stream.Sender: `payload` goes into the offer, `send` serves
    `receivers` readers."""

    def __init__(self, hub: Hub, receivers: int) -> None:
        self._hub, self._receivers = hub, receivers
        self._listener = bound(hub.host)
        self._token = secrets.token_hex(16)
        self.payload: dict[str, Any] = {"host": hub.host, "port": self._listener.getsockname()[1], "token": self._token}

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Send all buckets to all receivers, then close. Raises TrainerError: one did not come, join, answer or go on
        reading in time."""
        lines: list[Lines] = []
        try:
            with self._as_trainer_error(lines):
                self._meet(lines)
            # Asking for a bucket gathers weights: what fails there is the trainer's own and must not be blamed on a
            # receiver, so it stands outside the translation of errors.
            for bucket in buckets:
                with self._as_trainer_error(lines):
                    self._pass(bucket, lines)
            with self._as_trainer_error(lines):
                _write(lines, {"tensors": None})
        except BaseException:
            self._hub.drop()  # whoever still waits in it learns of the end
            raise
        finally:
            for line in lines:
                line.close()
            self.close()

    def close(self) -> None:
        """Withdraw the offer; the group stays. May be called twice."""
        self._listener.close()

    def _meet(self, lines: list[Lines]) -> None:
        greetings: list[Mapping[str, Any]] = []
        deadline = time.monotonic() + self._hub.timeout
        while len(lines) < self._receivers:
            # A timeout of 0 would make the socket non-blocking, and a late receiver a BlockingIOError.
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            line = Lines(self._listener.accept()[0], _GREETING)
            greeting = _greeting(line, self._token)
            if greeting is None:
                line.close()
                continue
            line.patience(self._hub.timeout)
            lines.append(line)
            greetings.append(greeting)
        # Ranks can be numbered only now that all have come and it is known how many processes each stands for.
        for line, group in zip(lines, self._hub.assign(greetings), strict=True):
            line.write({"group": group})
        # Joining may wait for every member: only after each of them was told its rank.
        self._hub.join(lines)
        for line in lines:
            line.read()

    def _pass(self, bucket: Bucket, lines: Sequence[Lines]) -> None:
        # A broadcast carries bytes alone: receivers allocate what they read into from this line.
        described = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket]
        for line in lines:
            line.write({"tensors": described})
        self._hub.broadcast([tensor for _, tensor in bucket], lines)
        for line in lines:
            line.read()

    @contextlib.contextmanager
    def _as_trainer_error(self, lines: Sequence[Lines]) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, RuntimeError) as error:  # torch.distributed raises RuntimeErrors
            # torch's OutOfMemoryError is a RuntimeError; turnwise_torch.guard turns it into advice.
            if is_out_of_memory(error):
                raise
            # gloo and NCCL report a timeout as a RuntimeError in words of their own.
            late = isinstance(error, TimeoutError) or "timeout" in str(error).lower()
            what = (
                f"did not join or read the weights within weight_sync_timeout = {self._hub.timeout:g} s"
                if late
                else "stopped reading the weights"
            )
            reason = "" if late else f" ({_short(error)})"
            raise TrainerError(
                f"weight update: {len(lines)} of {self._receivers} backends came, and one {what}{reason}"
            ) from error


class Call:
    """A receiver's line to the trainer that offers weights. Raises EngineError throughout: the trainer is gone, or
    silent for `timeout` seconds.

    `ranks`: how many processes of the group this receiver stands for, `holds`: the name of the group that they are in,
    `device`: cpu or cuda. `group` is what they have to join where `new`, else what they are in: name, host, port, rank
    (the first of `ranks`), size, backend.
    """

    def __init__(
        self, payload: Mapping[str, Any], timeout: float, ranks: int = 1, holds: str = "", device: str = "cpu"
    ) -> None:
        try:
            connection = socket.create_connection((payload["host"], payload["port"]), timeout)
        except OSError as error:
            where = f"{payload['host']}:{payload['port']}"
            raise EngineError(
                f"weight update: the trainer's offer at {where} is gone, or cannot be reached from here ({error})"
            ) from error
        self.address = str(connection.getsockname()[0])
        self.line = Lines(connection, timeout)
        try:
            with _as_engine_error():
                self.line.write({"token": payload["token"], "ranks": ranks, "holds": holds, "device": device})
                # Waits for all other receivers, too: the trainer numbers ranks once all have come.
                self.group: Mapping[str, Any] = self.line.read()["group"]
        except BaseException:
            self.line.close()
            raise
        self.new: bool = self.group["new"]

    def answer(self) -> None:
        """The group is joined, or the last bucket is read."""
        with _as_engine_error():
            self.line.write({})

    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """(name, dtype, shape) of what is broadcast next; None: that was all, and it was answered."""
        with _as_engine_error():
            described = self.line.read()["tensors"]
            if described is None:
                self.line.write({})
                return None
        return [(name, dtype, tuple(shape)) for name, dtype, shape in described]

    def close(self) -> None:
        """Hang up; a trainer in the midst of sending gives up."""
        self.line.close()


class Member:
    """A receiving process, one rank of the group; it keeps the group between updates."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name = ""
        self._group: Any = None

    def receive(self, payload: Mapping[str, Any], timeout: float) -> Generator[Bucket, None, None]:
        """The sender's buckets, one after the other; tensors on the device by NCCL, on the CPU by gloo, and the
        receiver's own.

        Raises EngineError: the trainer is gone, or was silent for `timeout` seconds. Ending the iteration early ends
        the sender's work too.
        """
        call = Call(payload, timeout, 1, self._name, self._device.type)
        whole = False
        try:
            facts, lines = call.group, [call.line]
            device = self._device if facts["backend"] == "nccl" else torch.device("cpu")
            with _as_engine_error():
                if call.new:
                    self.leave()
                    self._group = watched(
                        lambda: group_of(facts, meeting(facts, timeout), call.address, timeout), lines, timeout
                    )
                    self._name = facts["name"]
            call.answer()
            while (described := call.tensors()) is not None:
                bucket = [
                    (name, torch.empty(shape, dtype=getattr(torch, dtype), device=device))
                    for name, dtype, shape in described
                ]
                with _as_engine_error():
                    broadcast_within(self._group, [tensor for _, tensor in bucket], device, lines, timeout)
                yield bucket
                call.answer()
            whole = True
        finally:
            # A group in which a collective was cut short cannot be used again; the sender drops its end as well.
            if not whole:
                self.leave()
            call.close()

    def leave(self) -> None:
        """Leave the group; may be called twice."""
        group, self._group, self._name = self._group, None, ""
        abort(group)


@contextlib.contextmanager
def _as_engine_error() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        raise EngineError(
            "weight update: the trainer stopped sending, or was silent for too long (weight_sync_timeout):"
            f" {_short(error)}"
        ) from error


def _greeting(line: Lines, token: str) -> Mapping[str, Any] | None:
    """What a receiver says first; None for whoever does not know the token."""
    try:
        greeting = line.read()
    except (OSError, EOFError, ValueError):
        return None
    # JSON may hold half a surrogate pair, which has no UTF-8: no stranger's bytes may end the update.
    said = str(greeting.get("token")).encode(errors="replace") if isinstance(greeting, dict) else b""
    # In constant time, for whoever reaches the port may guess.
    return greeting if secrets.compare_digest(said, token.encode()) else None


def _write(lines: Sequence[Lines], message: Mapping[str, Any]) -> None:
    """Write to all, then read every answer."""
    for line in lines:
        line.write(message)
    for line in lines:
        line.read()


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or "it hung up"
