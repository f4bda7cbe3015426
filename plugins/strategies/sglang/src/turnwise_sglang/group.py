"""The way of new weights from the trainer straight into a server's processes: they join a process group, and each
broadcast is announced to them."""

from __future__ import annotations

import asyncio
import contextlib

from turnwise.contracts.train import Offer
from turnwise.errors import EngineError
from turnwise_serving.http import Gone
from turnwise_sglang.link import Link
from turnwise_sglang.weights import Names
from turnwise_torch.broadcast import Call


async def from_group(link: Link, offer: Offer, names: Names, timeout: float) -> None:
    """Let the server receive the offered weights inside an update session; the group is kept for the next. Raises
    EngineError, Gone."""
    call = await asyncio.to_thread(Call, offer.payload, timeout, link.ranks, link.group, link.device)
    try:
        await _joined(link, call, timeout)
        await link.api.post("/begin_weight_update", {}, timeout)
        await _received(link, call, names, timeout)
        await link.api.post("/end_weight_update", {}, timeout)
        # Only now: a version of a half-written model would be a lie.
        await link.api.post(
            "/update_weight_version", {"new_version": str(offer.version), "abort_all_requests": False}, timeout
        )
    except EngineError:
        # First: the trainer leaves the group, and a server that waits in it goes on.
        await asyncio.to_thread(call.close)
        # The first error is the one to report.
        with contextlib.suppress(EngineError, Gone):
            await link.api.post("/end_weight_update", {})
        await _left(link)
        raise
    finally:
        await asyncio.to_thread(call.close)


async def _joined(link: Link, call: Call, timeout: float) -> None:
    if call.new:
        await _left(link)
        group = call.group
        body = {
            "master_address": group["host"],
            "master_port": group["port"],
            "rank_offset": group["rank"],
            "world_size": group["size"],
        }
        await link.api.post(
            "/init_weights_update_group", {**body, "group_name": group["name"], "backend": group["backend"]}, timeout
        )
        link.group = group["name"]
    await asyncio.to_thread(call.answer)


async def _received(link: Link, call: Call, names: Names, timeout: float) -> None:
    while (tensors := await asyncio.to_thread(call.tensors)) is not None:
        own = [names.check(name, shape) for name, _, shape in tensors]
        body = {
            "names": own,
            "dtypes": [dtype for _, dtype, _ in tensors],
            "shapes": [list(shape) for _, _, shape in tensors],
        }
        await link.api.post(
            "/update_weights_from_distributed", {**body, "group_name": link.group, "flush_cache": False}, timeout
        )
        await asyncio.to_thread(call.answer)
    names.complete()


async def _left(link: Link) -> None:
    """Let the server leave a group that is of no use any more."""
    name, link.group = link.group, ""
    if name:
        # It may have left already; a server that is gone is found out by the next call.
        with contextlib.suppress(EngineError, Gone):
            await link.api.post("/destroy_weights_update_group", {"group_name": name})
