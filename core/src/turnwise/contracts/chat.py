"""Model sources: where the model folder comes from, and its chat format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen

from turnwise.errors import Problem

Recipe = Mapping[str, Any]
"""`pretrain` as a mapping: what a model source makes a model of; its keys are the source's own."""
Message = dict[str, Any]
"""`{"role": str, "content": str | list of parts}`; an image part is `{"type": "image", "image": uint8 H×W×3}`."""


class Chat(Protocol):
    """The chat format of one model folder, in token ids. Images are expanded: the ids are those that the model sees.

    `render` and `extend` raise ConfigError for what the format cannot show: a role that the template refuses, an image
    for a text model."""

    stop_ids: tuple[int, ...]
    """Token ids that end an assistant's turn."""

    def with_args(self, args: Mapping[str, Any]) -> Chat:  # Any: what the model's template reads
        """The same format with further arguments for its template, such as `enable_thinking`, in `render` and `extend`
        alike; itself without any. Raises ConfigError for one that the template does not read."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        images: Sequence[np.ndarray] = (),
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> np.ndarray:  # Any: JSON schemas of tools
        """int32 ids of the conversation, ending with the header of the assistant's turn to come."""
        ...

    def extend(
        self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """The ids to append to `ids` (a prompt and its sampled response, which ended by `finish`): the template's end
        of the assistant's turn as far as it was not sampled, then `messages`, then the header of the next assistant's
        turn."""
        ...

    def continue_text(self, ids: np.ndarray, text: str) -> np.ndarray:
        """The ids of plain `text` that continues `ids` inside the same message (`history: single_turn`)."""
        ...

    def decode(self, ids: np.ndarray, special: bool = False) -> str:
        """The text of sampled ids, without special tokens (the end of the turn, another message's header, padding, an
        unknown word), wherever they were sampled. `special`: with them, as a reader who compares tokens and a parser of
        tool calls want it."""
        ...

    def begins_image(self, ids: np.ndarray) -> bool:
        """Whether sampled `ids` hold tokens with which an image begins: an image after them would be sought in their
        place."""
        ...


@frozen
class ModelSourceContext:
    """`cache`: folder in which a prepared model may be kept. `texts`: the environments' own texts, as messages with the
    role under which a model would read or write them (for training a tokenizer); calling it plays a few episodes with
    random actions, so call it only when needed. `seed`: the run's seed. `trust_remote_code`: whether Python code in the
    model's folder may run.

    `tokenizer`: the exported model folder of the checkpoint that the run goes on from (None: it begins). A source that
    would make a tokenizer
    takes that one: another numbers its tokens in another way, and the weights that are loaded afterwards know the old
    numbers."""

    cache: Path
    seed: int = 0
    texts: Callable[[], Iterable[Message]] = field(default=tuple)
    trust_remote_code: bool = False
    tokenizer: Path | None = None


class ModelSource(Protocol):
    """Built as `Source(config, context)`."""

    def prepare(self, pretrain: str | Recipe) -> Path:
        """A folder in Hugging Face layout with tokenizer for a path, a hub id or a recipe. Called once, before any role
        is built. Raises ConfigError (not a model, unknown recipe key) or MachineError (cannot be fetched here)."""
        ...

    def check(self, pretrain: str | Recipe) -> list[Problem]:
        """What can be known before anything starts; paths begin with `pretrain`."""
        ...

    def chat(self, folder: Path) -> Chat:
        """The chat format of a prepared folder."""
        ...
