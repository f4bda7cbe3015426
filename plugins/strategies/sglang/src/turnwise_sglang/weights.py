"""The way of new weights into a server: buckets of tensors or a folder, inside one update session; and a copy for a
server that dies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from turnwise.contracts.train import Offer
from turnwise.errors import EngineError, Problem
from turnwise_serving.http import Gone
from turnwise_sglang.api import Api
from turnwise_torch.stream import receive

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TIED = "lm_head.weight"
"""Offered beside the embedding it is tied to, though a folder holds the pair once."""
EARLIER = {"model.language_model.": "model.", "model.visual.": "visual."}
"""What transformers calls the parts of a vision-language model in memory, and in files, where SGLang looks for them."""


OWN_HEAD = ("qwen2_moe", "qwen3_moe")
"""Model types whose output head SGLang never ties to the embedding."""


def problems(folder: Path) -> list[Problem]:
    """What keeps the server from the weights of the model in `folder`, a folder that may be unprepared yet."""
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if facts.get("model_type") not in OWN_HEAD or not facts.get("tie_word_embeddings", False):
        return []
    return [
        Problem(
            "pretrain",
            f"SGLang's {facts['model_type']} does not tie its output head to the embedding, and would leave it empty:"
            " every token alike. Fix: a model with tie_word_embeddings: false, or another engine",
        )
    ]


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the safetensors files of `folder`. Raises EngineError for a file that cannot be
    read."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                # A slice reads the file's header alone, not the tensor.
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise EngineError(f"cannot read the weights in {path}: {error}") from error
    return found


class Names:
    """The tensors that the model's folder names, ticked off as they are offered: SGLang passes over a name that it does
    not know in silence."""

    def __init__(self, known: dict[str, tuple[int, ...]]) -> None:
        self._known = known
        self._seen: set[str] = set()

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """The name that the folder has for `name`. Raises EngineError for a name or a shape that the model does not
        have."""
        # A folder without safetensors files names nothing to compare with.
        if not self._known:
            return name
        for now, then in EARLIER.items():
            if (
                name not in self._known
                and name.startswith(now)
                and (earlier := then + name.removeprefix(now)) in self._known
            ):
                name = earlier
        if name not in self._known and name != TIED:
            raise EngineError(
                f"weight update: the trainer offers {name!r}, which the model's folder does not hold; SGLang would"
                " ignore it"
            )
        if name in self._known and shape != self._known[name]:
            raise EngineError(f"weight update: {name!r} has shape {shape}, the model's is {self._known[name]}")
        self._seen.add(name)
        return name

    def complete(self) -> None:
        """Raises EngineError if a tensor of the folder was not offered."""
        if missing := sorted(self._known.keys() - self._seen):
            raise EngineError(
                f"weight update: {len(missing)} of the model's tensors were not offered, such as {missing[0]!r}"
            )


def check_folder(model: Path, folder: Path) -> None:
    """Raises EngineError unless the files in `folder` hold what those in `model` do, by the names that SGLang knows."""
    names = Names(shapes(model))
    for name, shape in shapes(folder).items():
        if names.check(name, shape) != name:
            raise EngineError(
                f"weight update: SGLang would ignore {name!r} in a file. Fix: shared_memory or process_group, which"
                " rename it"
            )
    names.complete()


class Kept:
    """The weights that a server was given last, in a folder of safetensors files, for the server that takes its
    place."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="turnwise-sglang-weights-"))
        # Deleted when the interpreter ends, too.
        self._delete = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._next: Path | None = None
        self.folder: Path | None = None
        self.version = 0
        self.elsewhere = False
        """Whether the last weights came without passing here, so that there is no copy of them."""

    def begin(self) -> None:
        """What follows is a new set of weights."""
        self._drop(self._next)
        self._next = Path(tempfile.mkdtemp(dir=self._root))

    def add(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Write one bucket."""
        assert self._next is not None
        # Files by number: a bucket's tensors need not be in one of the folder's own.
        save_file(dict(bucket), str(self._next / f"model-{len(list(self._next.iterdir())):05d}.safetensors"))

    def add_folder(self, folder: Path) -> None:
        """Take the files of `folder`: links where the file system allows them, else copies."""
        assert self._next is not None
        for path in folder.glob("*.safetensors"):
            try:
                os.link(path.resolve(), self._next / path.name)
            except OSError:
                shutil.copyfile(path, self._next / path.name)

    def commit(self, version: int) -> None:
        """From now on these are the last weights."""
        previous, self.folder, self._next, self.version = self.folder, self._next, None, version
        self.elsewhere = False
        self._drop(previous)

    def passed_by(self) -> None:
        """The last weights are ones that were not kept; the copy of older ones is of no use."""
        self._drop(self.folder)
        self.folder, self.elsewhere = None, True

    def close(self) -> None:
        """Delete everything; may be called twice."""
        self._delete()

    @staticmethod
    def _drop(folder: Path | None) -> None:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


async def from_folder(api: Api, folder: Path, version: int, timeout: float) -> None:
    """Let the server read the weights in `folder`. Raises EngineError, Gone.

    The format is named: a server that began with `load_format: dummy` would otherwise fill its weights with random
    numbers again.
    """
    body = {
        "model_path": str(folder),
        "load_format": "safetensors",
        "weight_version": str(version),
        "flush_cache": True,
    }
    await api.post("/update_weights_from_disk", body, timeout)


async def from_stream(
    api: Api, offer: Offer, names: Names, dtype: torch.dtype, ranks: int, kept: Kept | None, timeout: float
) -> bool:
    """Post the trainer's buckets one by one inside an update session. Returns False if the server died meanwhile and
    only `kept` has them.

    `ranks`: SGLang wants a payload for each of its tensor parallel ranks. Raises EngineError; Gone where nothing is
    kept.
    """
    buckets = receive(offer.payload, timeout)
    try:
        alive = await _survives(api.post("/begin_weight_update", {}, timeout), kept)
        while (bucket := await asyncio.to_thread(_next, buckets, dtype, names)) is not None:
            if kept is not None:
                # Even when the server has died of an earlier bucket: its successor starts from this copy.
                await asyncio.to_thread(kept.add, bucket)
            if alive:
                payload = await asyncio.to_thread(_encoded, bucket, ranks)
                alive = await _survives(api.post("/update_weights_from_tensor", payload, timeout), kept)
        # Before the session ends: an update that lacks a tensor must not get a version.
        names.complete()
        if alive:
            alive = await _survives(api.post("/end_weight_update", {}, timeout), kept)
        # Only now: a version of a half-written model would be a lie.
        if alive:
            body = {"new_version": str(offer.version), "abort_all_requests": False}
            alive = await _survives(api.post("/update_weight_version", body, timeout), kept)
    except EngineError:
        # The first error is the one to report.
        with contextlib.suppress(EngineError, Gone):
            await api.post("/end_weight_update", {})
        raise
    finally:
        await asyncio.to_thread(buckets.close)  # type: ignore[attr-defined]
    return alive


async def _survives(call: Awaitable[Any], kept: Kept | None) -> bool:
    """Whether the server lived to answer; without a copy of the weights its death ends the update (Gone)."""
    try:
        await call
    except Gone:
        if kept is None:
            raise
        return False
    return True


def _next(
    buckets: Iterator[list[tuple[str, Tensor]]], dtype: torch.dtype, names: Names
) -> list[tuple[str, Tensor]] | None:
    """The next bucket as copies in the server's dtype (the offered tensors are views of memory that the sender writes
    again)."""
    bucket = next(buckets, None)
    if bucket is None:
        return None
    named = [(names.check(name, tuple(tensor.shape)), tensor) for name, tensor in bucket]
    return [
        (name, tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()) for name, tensor in named
    ]


def _encoded(bucket: list[tuple[str, Tensor]], ranks: int) -> bytes:
    """The JSON of /update_weights_from_tensor. Tensors are pickled by value: handles to shared memory work only between
    relatives."""
    payload = base64.b64encode(pickle.dumps(bucket)).decode()
    body: dict[str, Any] = {"serialized_named_tensors": [payload] * ranks, "flush_cache": False}
    return json.dumps(body).encode()
