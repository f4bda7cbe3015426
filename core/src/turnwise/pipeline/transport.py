"""How weights go from the trainer to the backend: by which transport, and the two sides of one update."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from turnwise.config.schema import RunConfig
from turnwise.contracts.inference import receivers
from turnwise.contracts.train import Offer
from turnwise.errors import EngineError, OutOfMemory

GRACE_SECONDS = 10.0
"""After the failure of one side: how long the other may take to notice it and end in good order; more than a role waits for its own ranks."""


def choose(config: RunConfig, offered: Sequence[str], taken: Sequence[str], one_process: bool) -> str:
    """The first of `taken` (best first) that the trainer offers and that works in this run. Raises EngineError.

    `shared` needs one process and one dtype. `process_group` needs devices of the backend's own: NCCL has no two ranks of a group on one GPU.
    """
    train, infer = config.actor_train, config.actor_infer
    excluded = set()
    if not one_process or train.model_args.dtype != infer.model_args.dtype:
        excluded.add("shared")
    if set(train.device_mapping) & set(infer.device_mapping):
        excluded.add("process_group")
    for transport in taken:
        if transport in offered and transport not in excluded:
            return transport
    raise EngineError(
        f"actor_train offers weights by {list(offered)}, actor_infer takes {list(taken)}: no common transport. "
        "Fix: choose a backend that can be trained; players serve `turnwise rollout` and `turnwise eval` only."
    )


async def update(trainer: Any, backend: Any, transport: str, version: int, *, pausing: float, passing: float) -> None:
    """Weights of `version` from the trainer to the backend, between two tokens; the version is verified.

    Raises EngineError or TrainerError; also when the backend needs more than `pausing` seconds to pause, or the weights more than `passing`.
    """
    try:
        async with asyncio.timeout(pausing):
            # Before an offer waits for its readers, and before they are counted: an engine that is not up starts here, one that died is noticed.
            await backend.pause()
    except TimeoutError as error:
        raise EngineError(f"the backend did not pause for version {version} within runtime_timeout = {pausing:g} s") from error
    try:
        async with asyncio.timeout(passing):
            offer = await trainer.call("offer", transport, version, receivers(backend, transport))
            now = await deliver(trainer, backend, offer)
            await backend.resume()
    except Exception as error:
        with contextlib.suppress(Exception):  # the failure is told; what was attached to goes on without us
            async with asyncio.timeout(GRACE_SECONDS):
                await backend.resume()
        if isinstance(error, TimeoutError):
            raise EngineError(f"the weight update to version {version} took over weight_sync_timeout = {passing:g} s") from error
        raise
    if now != version:
        raise EngineError(f"the backend serves version {now} after the weight update to {version}")


async def deliver(trainer: Any, backend: Any, offer: Offer) -> int:
    """Let the trainer send `offer` and the backend receive it; returns the version that it serves. Raises what the first side to fail raised,
    but rather a trainer's OutOfMemory, of which a backend notices only that nothing more comes.

    The other is then given up: a trainer would wait for a backend that never comes as long as an update may take.
    """
    sides = [asyncio.ensure_future(trainer.call("send", offer)), asyncio.ensure_future(backend.receive(offer))]
    try:
        _, version = await asyncio.gather(*sides)
        return int(version)
    except Exception:
        await asyncio.wait(sides, timeout=GRACE_SECONDS)
        if sides[0].done() and not sides[0].cancelled() and isinstance(sides[0].exception(), OutOfMemory):
            sides[0].result()
        raise
    finally:
        for side in sides:
            side.cancel()
