"""Model sources: where the model folder comes from, and its chat format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen

Message = dict[str, Any]
"""`{"role": str, "content": str | list of parts}`; an image part is `{"type": "image", "image": uint8 H×W×3}`."""


class Chat(Protocol):
    """The chat format of one model folder, in token ids. Images are expanded: the ids are those that the model sees."""

    stop_ids: tuple[int, ...]
    """Token ids that end an assistant's turn."""

    def render(self, messages: Sequence[Message], images: Sequence[np.ndarray] = (), tools: Sequence[dict[str, Any]] | None = None) -> np.ndarray:
        """int32 ids of the conversation, ending with the header of the assistant's turn to come."""
        ...

    def extend(self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()) -> np.ndarray:
        """The ids to append to `ids` (a prompt and its sampled response, which ended by `finish`): the template's end of the
        assistant's turn as far as it was not sampled, then `messages`, then the header of the next assistant's turn."""
        ...

    def continue_text(self, ids: np.ndarray, text: str) -> np.ndarray:
        """The ids of plain `text` that continues `ids` inside the same message (`history: single_turn`)."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of sampled ids, without special tokens such as the end of the turn."""
        ...


@frozen
class ModelSourceContext:
    """`cache`: folder in which a prepared model may be kept. `texts`: the environments' own texts, as messages with the
    role under which a model would read or write them (for training a tokenizer); calling it plays a few episodes with random actions, so
    call it only when needed. `seed`: the run's seed."""

    cache: Path
    seed: int = 0
    texts: Callable[[], Iterable[Message]] = field(default=tuple)


class ModelSource(Protocol):
    """Built as `Source(config, context)`."""

    def prepare(self, pretrain: str | Mapping[str, Any]) -> Path:
        """A folder in Hugging Face layout with tokenizer for a path, a hub id or a recipe. Called once, before any role is built.
        Raises ConfigError (not a model, unknown recipe key) or MachineError (cannot be fetched here)."""
        ...

    def check(self, pretrain: str | Mapping[str, Any]) -> list[str]:
        """Problems that can be known before anything starts, one line each."""
        ...

    def chat(self, folder: Path) -> Chat:
        """The chat format of a prepared folder."""
        ...
