"""Weights from one node to another: read where the trainer is, carried by Ray's object store, served again where the
backends are.

Within a node weights go from process to process (turnwise_torch.stream), and Ray is not asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from attrs import evolve

from turnwise.contracts.train import Offer
from turnwise.errors import EngineError
from turnwise_ray.actors import Answer, Process, death, process, result

TRANSPORT = "shared_memory"
"""The transport that ends at its node."""

Packed = list[tuple[str, str, tuple[int, ...], np.ndarray]]
"""A bucket: name, dtype, shape and the bytes of each tensor."""


async def relayed(
    offer: Offer,
    source: Mapping[str, Any],
    sink: Mapping[str, Any],
    readers: int,
    read: Callable[[Offer], Sequence[Awaitable[None]]],
    role: str,
    seconds: float,
) -> None:
    """Read the offer where `source` is placed and serve it `readers` times where `sink` is; `read`: what reads it there,
    given the offer of that place. Raises EngineError, also where the two do not come up within `seconds`."""
    first, second = process(RelaySource, "relay.source", source), process(RelaySink, "relay.sink", sink)
    try:
        (await result(first.open.remote(offer.payload, seconds), seconds)).unwrap("relay.source", EngineError)
        opened = await result(second.open.remote(readers, seconds), seconds)
        there = evolve(offer, payload=opened.unwrap("relay.sink", EngineError))
        done = await asyncio.gather(result(second.pump.remote(first)), *read(there), return_exceptions=True)
        for one in done:  # what the relay says first: the engines know only that it stopped
            if isinstance(one, BaseException):
                raise one
            if isinstance(one, Answer):
                one.unwrap("relay.sink", EngineError)
    except TimeoutError as error:
        raise EngineError(
            f"{role}: the relay to another node did not come up within weight_sync_timeout = {seconds:g} s"
        ) from error
    except ray.exceptions.RayError as error:
        raise EngineError(f"{role}: the relay of weights to another node died. {death(error)}") from error
    finally:
        ray.kill(first)
        ray.kill(second)


class RelaySource(Process):
    """On the trainer's node: reads the stream, bucket by bucket."""

    def open(self, payload: Mapping[str, Any], timeout: float) -> Answer:
        """Prepare to read; the sender is met at the first bucket."""
        from turnwise_torch.stream import receive

        # A generator: nothing is connected before its first `next`.
        self._buckets = receive(payload, timeout)
        return self.answer(lambda: None)

    def next(self) -> Answer:
        """The next bucket, copied out of the shared memory; None at the end."""
        return self.answer(self._next)

    def _next(self) -> Packed | None:
        import torch

        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        return [
            # As bytes, for numpy has no bfloat16; copied, for the memory is overwritten by the next bucket.
            (
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                t.contiguous().reshape(-1).view(torch.uint8).numpy().copy(),
            )
            for name, t in bucket
        ]


class RelaySink(Process):
    """On the backends' node: serves what the source reads."""

    def open(self, receivers: int, timeout: float) -> Answer:
        """The payload of an offer on this node."""
        return self.answer(lambda: self._open(receivers, timeout))

    def _open(self, receivers: int, timeout: float) -> Mapping[str, Any]:
        from turnwise_torch.stream import Sender

        self._timeout = timeout
        self._sender = Sender(receivers, timeout)
        payload: Mapping[str, Any] = self._sender.payload
        return payload

    def pump(self, source: Any) -> Answer:
        """Serve until the source has no more; one bucket is fetched while another is served."""
        return self.answer(lambda: self._sender.send(self._fetched(source)))

    def _fetched(self, source: Any) -> Iterator[list[tuple[str, Any]]]:
        import torch

        from turnwise.errors import TrainerError

        coming = source.next.remote()
        while True:
            packed = ray.get(coming, timeout=self._timeout).unwrap("relay", TrainerError)
            if packed is None:
                return
            coming = source.next.remote()
            yield [(name, _tensor(getattr(torch, dtype), shape, data)) for name, dtype, shape, data in packed]


def _tensor(dtype: Any, shape: tuple[int, ...], data: np.ndarray) -> Any:
    """The tensor of these bytes, in memory of its own: Ray's is read-only."""
    import torch

    return torch.from_numpy(np.array(data)).view(dtype).reshape(shape) if data.size else torch.empty(shape, dtype=dtype)
