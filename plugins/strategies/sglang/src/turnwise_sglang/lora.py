"""Low-rank adapters alone: read from an offer here, in this process, and put into a server as one more adapter that
requests then name."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import Offer
from turnwise.errors import EngineError, Problem
from turnwise_serving.http import Gone
from turnwise_serving.models import sees
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.link import Link
from turnwise_torch.adapters import adapter_buckets
from turnwise_torch.broadcast import Member
from turnwise_torch.stream import Bucket


@frozen(eq=False)
class Adapter:
    """PEFT's configuration and tensors of one version, which a server that takes the place of a dead one is given
    again."""

    version: int
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]


def problems(config: SglangConfig, context: InferenceContext) -> list[Problem]:
    """What keeps a server of this configuration from taking adapters alone."""
    where, fix = "actor_infer.strategy_args.strategy_config", "or actor_train.model_args.lora_sync: merged"
    if context.lora is None:
        return []
    found = list[Problem]()
    if config.load_format == "dummy":
        found.append(
            Problem(
                f"{where}.load_format",
                "dummy, while adapters alone arrive: the model's weights would stay random. Fix: load_format: auto,"
                f" {fix}",
            )
        )
    if sees(context.model):
        found.append(
            Problem(
                "actor_infer",
                "adapters alone for a model that takes images are not supported by sglang. Fix:"
                f" {fix.removeprefix('or ')}",
            )
        )
    if config.dp_size > 1:
        found.append(
            Problem(
                f"{where}.dp_size", f"SGLang loads adapters into one copy of the model only. Fix: dp_size: 1, {fix}"
            )
        )
    return found


def read(
    offer: Offer, member: Member, dtype: torch.dtype, timeout: float, known: Mapping[str, tuple[int, ...]]
) -> Adapter:
    """The adapter on offer, by any transport, cast to the server's dtype; `known`: the shapes of the model's tensors,
    by name. Blocks.

    Raises EngineError: nothing to read, or tensors that are of no layer of the model.
    """
    assert offer.adapter is not None
    tensors: dict[str, Tensor] = {}
    with contextlib.closing(adapter_buckets(offer, member, timeout)) as buckets:
        for bucket in buckets:
            _check(bucket, offer.adapter["r"], known)
            tensors |= {name: tensor.to(device="cpu", dtype=dtype, copy=True) for name, tensor in bucket}
    if not tensors:
        raise EngineError("weight update: the trainer offers an adapter without tensors")
    # The modules by name: SGLang takes neither a regular expression nor whole paths.
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    return Adapter(offer.version, {**offer.adapter, "target_modules": modules}, tensors)


def _check(bucket: Bucket, rank: int, known: Mapping[str, tuple[int, ...]]) -> None:
    """SGLang passes over a name that it does not know in silence, and dies of a wrong shape when it samples."""
    for name, tensor in bucket if known else ():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        whole = known.get(f"{module}.weight")
        if whole is None or part not in ("A.weight", "B.weight"):
            raise EngineError(
                f"weight update: the trainer offers {name!r}, for which the model's folder holds no weight; SGLang"
                " would ignore it"
            )
        # As PEFT has them: A from the layer's inputs to the rank, B from there to its outputs.
        shape = (rank, whole[1]) if part == "A.weight" else (whole[0], rank)
        if tuple(tensor.shape) != shape:
            raise EngineError(
                f"weight update: {name!r} has shape {tuple(tensor.shape)}, rank {rank} of {module}.weight is {shape}"
            )


async def load(link: Link, adapter: Adapter, timeout: float) -> None:
    """Put the adapter into a server in which nothing is being sampled; the one before leaves it. Raises EngineError,
    Gone."""
    # A name of its own: an attached server may hold this version from another run.
    name = f"turnwise-{adapter.version}-{uuid.uuid4().hex[:8]}"
    payload = base64.b64encode(pickle.dumps(adapter.tensors)).decode()
    body = {"lora_name": name, "config_dict": dict(adapter.config), "serialized_named_tensors": [payload] * link.ranks}
    await link.api.post("/load_lora_adapter_from_tensors", json.dumps(body).encode(), timeout)
    # Noted at once: from here on a failure must not leave requests naming an adapter that is about to leave.
    previous, link.adapter = link.adapter, name
    if previous:
        await link.api.post("/unload_lora_adapter", {"lora_name": previous}, timeout)
    # Last: a version of other weights would be a lie.
    await link.api.post(
        "/update_weight_version", {"new_version": str(adapter.version), "abort_all_requests": False}, timeout
    )


async def unload(link: Link) -> None:
    """Take our adapter out of a server that lives on, if it has one."""
    name, link.adapter = link.adapter, ""
    if name:
        # It may be gone.
        with contextlib.suppress(EngineError, Gone):
            await link.api.post("/unload_lora_adapter", {"lora_name": name})
