"""Inference backends: they turn a prompt into a sampled response, and receive new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from attrs import field, frozen

from turnwise.contracts.capabilities import Capabilities, Options
from turnwise.contracts.chat import Chat, Message
from turnwise.contracts.train import Lora, Offer
from turnwise.data.ranges import NOT_NEGATIVE, POSITIVE, RANGE, TOP_P
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import EngineError, Problem

DeviceMemory = Literal["weights", "cache"]
"""What a sampler holds on its devices: the model with what belongs to it, and the KV cache."""


@frozen
class GeneratingArgs:
    """How to sample. `temperature` 0 is greedy. `top_p` 1 and `top_k` 0 switch truncation off. `stop_strings` end a
    response too."""

    max_new_tokens: int = field(default=128, metadata={RANGE: POSITIVE})
    temperature: float = field(default=1.0, metadata={RANGE: NOT_NEGATIVE})
    top_p: float = field(default=1.0, metadata={RANGE: TOP_P})
    top_k: int = field(default=0, metadata={RANGE: NOT_NEGATIVE})
    stop_strings: tuple[str, ...] = ()
    include_stop_str_in_output: bool = True


# By identity: two equal requests are two, and `abort` names one of them.
@frozen(eq=False)
class Request:
    """One response to sample.

    `ids` int32 (backends of `input: ids`) or `messages` (of `input: messages`). `seed`: equal seeds, weights and ids
    give equal tokens.
    `order`: (evaluation, group, member, attempt, turn), the order in which a batching backend arranges its rows.
    `actions`: the legal texts that the environment reported, for players. `tag` and `observation` are for a human
    reader.
    """

    seed: int
    args: GeneratingArgs
    max_new_tokens: int
    order: tuple[int, ...] = ()
    ids: np.ndarray | None = None
    messages: tuple[Message, ...] | None = None
    images: tuple[np.ndarray, ...] = ()
    actions: tuple[str, ...] = ()
    tag: str = ""
    extras: dict[str, Any] = field(factory=dict)


@frozen
class InferenceContext:
    """What a backend is built with: the prepared model folder and its chat (None for players that need no model), the
    seed, `dtype` (bf16 | fp16 | fp32), `attn_implementation`, the devices, the largest sequence, and how long a weight
    update may take.

    `lora`: the adapters that every weight update will bring alone (`Offer.adapter`), over the weights of `model`; None:
    whole weights come.
    `updates`: whether weights will be sent at all; False (evaluation, episodes to look at): those of `model` have to
    serve.
    `sleeps`: a training role uses some of the devices, which are GPUs: `sleep` and `wake` will be called.
    `trust_remote_code`: whether Python code in the model's folder may run."""

    model: Path | None
    chat: Chat | None
    seed: int = 0
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    attn_implementation: str = "sdpa"
    devices: tuple[int, ...] = ()
    sequence_length: int = 2048
    infer_batch_size: int = 0
    weight_sync_timeout: float = 600.0
    lora: Lora | None = None
    updates: bool = True
    sleeps: bool = False
    trust_remote_code: bool = False

    def is_model(self, named: str) -> bool:
        """Whether `named`, a folder of this machine or a hub id with which a server was started, is `model`."""
        if self.model is None:
            return False
        # The hub's cache keeps a model so.
        fetched = {f"models--{named.replace('/', '--')}"} & {part.name for part in self.model.parents}
        return bool(fetched) or Path(named).expanduser().resolve() == self.model.resolve()

    @property
    def needs_its_model(self) -> bool:
        """Whether an engine has to hold the weights of `model` before anything is sent: nobody will send whole ones."""
        return self.lora is not None or not self.updates


@frozen
class BackendCapabilities(Capabilities):
    """`adapters`: it takes offers of adapters alone. `cannot_sleep`: why `sleep` will be refused on GPUs, and the fix
    ("": it will not be).
    `sleeps_on_demand`: nobody chose whether its engine can sleep, so it is started as `InferenceContext.sleeps` says.
    `updates_between_tokens`: a response that is paused goes on with new weights, reads its beginning again with them, and
    stamps each token with its version. `attached`: it uses an engine that runs already, and so no device that the runtime would give to the role.

    Arithmetic of its options: `devices_per_engine`: devices of one engine, where its sizes decide that.
    `data_parallel_size(devices)`: how many copies of the model they hold (ValueError with the sizes that do not divide
    them). `memory(facts)`: bytes on one device of `weights`, `kv_cache` and `activations`; `facts` has `parameters`,
    `dtype` and `device_bytes`. Without it: the weights, and a full cache of all episodes that play at once."""

    kind: ClassVar[str] = "inference_backend"
    adapters: bool = False
    cannot_sleep: str = ""
    sleeps_on_demand: bool = False
    attached: bool = False
    updates_between_tokens: bool = False
    devices_per_engine: int | None = None
    data_parallel_size: Callable[[int], int] | None = None
    memory: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None


class InferenceBackend(Protocol):
    """Built as `Backend(config, context)`; all methods but `live`, `receivers` and the static ones are coroutines of
    the driver's event loop.

    What it can do beyond that it declares as BackendCapabilities.
    """

    input: Literal["ids", "messages"]
    """What requests carry; a class attribute, read before anything is built."""

    @staticmethod
    def transports(config: Options, context: InferenceContext) -> tuple[str, ...]:
        """By which transports it takes weights when it is built so, best first; () for a player. Asked before anything
        is built, too."""
        ...

    @staticmethod
    def check(config: Options, context: InferenceContext) -> list[Problem]:
        """What is wrong, as far as that can be known before anything is built: `context.model` is the empty path
        then."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Sample one response. Raises EngineError."""
        ...

    def live(self, episodes: int) -> None:
        """How many episodes are running, reported at every change: a batching backend may wait until all of them wait
        for it."""
        ...

    def receivers(self, transport: str) -> int:
        """How many engines read an offer of this transport, each for itself."""
        ...

    async def receive(self, offer: Offer) -> int:
        """Take the offered weights and return the version that now serves."""
        ...

    async def pause(self) -> None:
        """Stop sampling between two tokens; requests are kept. Weights may be offered next, so an engine that is not up
        is started."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def abort(self, request: Request) -> None:
        """Drop a request whose episode gave up."""
        ...

    async def sleep(self) -> None:
        """Give the device memory back (colocated roles)."""
        ...

    async def wake(self, what: DeviceMemory) -> None:
        """Undo `sleep` for one part. `weights` come first, so that an update can fill them while the trainer is on the
        device; `cache` when the trainer has left, and only then is there anything to sample with. A part that is awake
        stays so."""
        ...

    async def close(self) -> None:
        """Release everything; may be called twice."""
        ...


def checked_ids(request: Request, backend: str, vocabulary: int, longest: int, limit: str = "") -> np.ndarray:
    """The request's ids, int32 [n], 0 < n < `longest`. Raises EngineError for what no engine may see: no ids, ids
    outside the `vocabulary`, no room for a response, sampling outside the allowed ranges.

    `backend`: its name; `limit`: what sets `longest`, as the message names it (default: sequence_length)."""
    args, where = request.args, f" (request of {request.tag})" if request.tag else ""
    if request.ids is None or not len(request.ids):
        raise EngineError(f"the {backend} backend takes token ids, and the request has none{where}")
    ids = int32(request.ids)
    # At `longest` there would be no room for a single sampled token.
    if len(ids) >= longest:
        raise EngineError(
            f"a prompt of {len(ids)} tokens leaves no room for a response within"
            f" {limit or f'sequence_length {longest}'}{where}. Fix: raise sequence_length, or shorten the history"
        )
    if outside := ids[(ids < 0) | (ids >= vocabulary)].tolist():
        raise EngineError(f"token id {outside[0]} is outside the model's vocabulary of {vocabulary}{where}")
    if request.max_new_tokens < 1 or args.temperature < 0 or not 0 < args.top_p <= 1 or args.top_k < 0:
        raise EngineError(
            f"cannot sample {request.max_new_tokens} tokens with {args}{where}: outside the allowed ranges"
        )
    return ids
