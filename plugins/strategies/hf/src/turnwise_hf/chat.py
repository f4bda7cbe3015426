"""The chat format of a model folder: its chat template in token ids, whole conversations and continuations."""

from __future__ import annotations

import copy
import inspect
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from turnwise.contracts.chat import Message
from turnwise.data.trajectory import int32
from turnwise.errors import ConfigError, one_line
from turnwise_torch.models import untrusted
from turnwise_torch.vision import Vision, has_vision

_SENTINEL = "turnwise7b1d5e"
"""Stands for the sampled response in a rendered conversation. No white space and no marks: no template strips or cuts it."""
# Entries of a cache, and ids in all of them: 8 million ids of 4 bytes are 32 MB.
_CACHED = 16384
_CACHED_TOKENS = 8_000_000
T = TypeVar("T")


class Recent(Generic[T]):
    """A bounded map that forgets what was not asked for longest: at most `_CACHED` entries and `_CACHED_TOKENS` of
    summed size."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        """The value put under `key`, unless it was forgotten."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: T, size: int) -> T:
        """Remember `value`, and return it."""
        with self._lock:
            # The same key may come twice, from two threads that both missed it: its old size must not be counted on.
            self._size += size - self._entries.pop(key, (value, 0))[1]
            self._entries[key] = (value, size)
            while len(self._entries) > _CACHED or self._size > _CACHED_TOKENS:
                self._size -= self._entries.popitem(last=False)[1][1]
        return value


class HfChat:
    """A `turnwise.contracts.chat.Chat` of a folder's tokenizer and chat template, for text, and for images where the
    model has a vision tower.

    Returned arrays are cached and read-only. Several threads may use it.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        """Raises ConfigError for a folder without a usable tokenizer or chat template, or with a tokenizer of code that
        is not to run."""
        self.folder, self._trusted = Path(folder), trust_remote_code
        try:
            self.tokenizer = _load_tokenizer(self.folder, trust_remote_code)
        # What stands in a broken folder reaches code that expects anything but that, in Rust too.
        except Exception as error:
            reason = untrusted(error) or f"{one_line(error)}. Fix: save it with save_pretrained, or fetch it again"
            raise ConfigError(f"cannot load the tokenizer in {self.folder}: {reason}") from error
        self._vision = Vision(self.folder) if has_vision(self.folder) else None
        self._image_text = (
            None if self._vision is None else str(self.tokenizer.convert_ids_to_tokens(self._vision.token))
        )
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"{self.folder} has no chat template. Fix: put a Jinja template into it as chat_template.jinja"
            )
        self._args: dict[str, Any] = {}
        self._variants: dict[str, HfChat] = {}
        self._backend = self._fast_backend()
        # Text that continues a message is plain: what looks like a special token in it must not become one.
        self._plain = Tokenizer.from_str(self._backend.to_str())
        self._plain.encode_special_tokens = True
        self._rendered: Recent[np.ndarray] = Recent()
        self._continuations: Recent[tuple[np.ndarray, int]] = Recent()
        self._decoded: Recent[str] = Recent()
        self.stop_ids: tuple[int, ...] = self._find_stop_ids()
        self._check_vocabulary()
        # What the tokenizer calls special. Tokens that were merely added, such as <think>, are text that environments
        # and patterns read.
        added = {token for token, entry in self._backend.get_added_tokens_decoder().items() if entry.special}
        self._special = np.array(sorted(added | set(self.tokenizer.all_special_ids) | set(self.stop_ids)), np.int32)

    def __reduce__(self) -> tuple[Callable[..., HfChat], tuple[Path, bool, dict[str, Any]]]:
        """Another process reads the folder again."""
        return _chat_of, (self.folder, self._trusted, self._args)

    def with_args(self, args: Mapping[str, Any]) -> HfChat:
        """This chat with further arguments for its template; the same one for the same arguments."""
        if not args:
            return self
        wanted = {**self._args, **args}
        key = json.dumps(wanted, sort_keys=True, default=str)
        known = self._variants.get(key)
        if known is None:
            self._check_args(wanted)
            # Tokenizer and what was decoded are shared: only what the template writes differs.
            known = copy.copy(self)
            known._args, known._rendered, known._continuations = wanted, Recent(), Recent()
            # Two threads may make the same one: the first that is stored stays.
            known = self._variants.setdefault(key, known)
        return known

    def _check_args(self, args: Mapping[str, Any]) -> None:
        # transformers passes what it does not know to the template: a name of its own would change the call instead.
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in args:
            problem = ""
            if name in taken or name in ("messages", "kwargs"):
                problem = "is not an argument of the template's own"
            elif not re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)):
                problem = f"the chat template of {self.folder} does not read it"
            if problem:
                raise ConfigError(
                    f"template_args: {name!r}: {problem}. Fix: a name that the template reads, such as enable_thinking"
                    " where it does"
                )

    def render(
        self,
        messages: Sequence[Message],
        images: Sequence[np.ndarray] = (),
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> np.ndarray:
        """int32 ids of the conversation, ending with the header of the assistant's turn to come. Raises ConfigError
        (template, images)."""
        plain, counts = self._plain_messages(messages, images)
        # Images count by their number of tokens: with equal texts and counts the ids are equal, whatever the pixels.
        key = (_key(plain), counts, json.dumps(list(tools)) if tools else None)
        ids = self._rendered.get(key)
        if ids is None:
            ids = self._encode(self._template(plain, tools=tools), counts)
            self._rendered.put(key, ids, len(ids))
        return ids

    def extend(
        self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """The ids to append to `ids` (a prompt and its sampled response): the template's end of the assistant's turn as
        far as it was not sampled, `messages`, the header of the next assistant's turn. Raises ConfigError (template,
        images).

        They are what the template writes after the last assistant's content of a conversation, so neither what it puts
        before (a default system prompt) nor what it does to earlier turns (thinking stripped) matters, and no sampled
        token is encoded again.
        """
        plain, counts = self._plain_messages(messages, images)
        key = (_key(plain), counts)
        known = self._continuations.get(key)
        if known is None:
            continuation = self._encode(self._after_sentinel(plain, add_generation_prompt=True), counts)
            closing = len(self._encode(self._after_sentinel([], add_generation_prompt=False)))
            known = self._continuations.put(key, (continuation, closing), len(continuation))
        continuation, closing = known
        # The sampled end, the longest that fits: all of the closing, or its first tokens (as a rule the stop token
        # alone).
        for length in range(min(closing, len(ids)), 0, -1):
            if np.array_equal(ids[len(ids) - length :], continuation[:length]):
                return continuation[length:]
        return continuation

    def continue_text(self, ids: np.ndarray, text: str) -> np.ndarray:
        """int32 ids of plain `text` inside the same message; special tokens written in it stay text."""
        return int32(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: np.ndarray, special: bool = False) -> str:
        """The text of sampled ids, without special tokens; with `special`, all of them are visible."""
        ids = int32(ids)
        key = (ids.tobytes(), special)
        text = self._decoded.get(key)
        if text is None:
            # By our own list: a token that stops need not be special to the tokenizer.
            kept = ids if special else ids[~np.isin(ids, self._special)]
            text = self._decoded.put(key, self._backend.decode(kept.tolist(), skip_special_tokens=False), len(ids))
        return text

    def begins_image(self, ids: np.ndarray) -> bool:
        """Whether `ids` hold the start of an image and its first token; never for a text model."""
        return self._vision is not None and bool(len(self._vision.starts(int32(ids))))

    def _fast_backend(self) -> Tokenizer:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"the tokenizer in {self.folder} is no fast tokenizer ({type(self.tokenizer).__name__}). Fix:"
                " convert it"
            )
        # A copy of our own: transformers changes settings of its own one at each call, and a prompt must never be cut
        # or padded.
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _encode(self, text: str, counts: Sequence[int] = ()) -> np.ndarray:
        """int32 ids; the token of each image is repeated as often as `counts` says."""
        ids = int32(self._backend.encode(text, add_special_tokens=False).ids)
        if self._vision is not None:
            places = np.flatnonzero(ids == self._vision.token)
            if len(places) != len(counts):
                raise ConfigError(
                    f"the chat template of {self.folder} wrote {len(places)} image tokens for {len(counts)} images. "
                    "Fix: a template that shows parts of type image"
                )
            times = np.ones(len(ids), np.int64)
            times[places] = counts
            ids = np.repeat(ids, times)
        # The caches give the same array to every caller.
        ids.flags.writeable = False
        return ids

    def _template(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._args,
            )
        except Exception as error:  # a template is a program of the folder's, and may fail as any does
            said = (isinstance(error, jinja2.TemplateError) and error.message) or one_line(error)
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"the chat template of {self.folder} cannot render a conversation of roles {roles}:"
                f" {said}. Fix: other messages (the environment's or manager's templates), or another"
                " model"
            ) from error

    def _after_sentinel(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        # A user's message first: many templates refuse a conversation that the assistant begins.
        conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _SENTINEL}, *messages]
        text = self._template(conversation, add_generation_prompt=add_generation_prompt)
        _, found, after = text.partition(_SENTINEL)
        if not found or _SENTINEL in after:
            raise ConfigError(
                f"the chat template of {self.folder} does not write an assistant's content exactly once, so no turn can"
                " be appended. Fix: another one"
            )
        return after

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The template's own end of a turn first, then the tokenizer's, then what the folder's settings name."""
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        # The first special token after the assistant's content, if the template closes turns with one.
        closing = self._encode(self._after_sentinel([], add_generation_prompt=False))
        # One alone: what a template writes after it (a line break) is not sampled.
        stops = [*[token for token in closing.tolist() if token in special][:1], self.tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            if path.is_file():
                eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
                ends = eos if isinstance(eos, list) else [eos]
                if odd := [end for end in ends if end is not None and type(end) is not int]:
                    raise ConfigError(f"{path} says eos_token_id {odd[0]!r}. Fix: an id, or a list of ids")
                stops += ends
        return tuple(token for token in dict.fromkeys(stops) if token is not None)

    def _check_vocabulary(self) -> None:
        """Raise ConfigError for a tokenizer that cuts no text, or is of another model: its ids are beyond the rows of
        the embedding."""
        if not self._backend.encode("a", add_special_tokens=False).ids:
            raise ConfigError(
                f"the tokenizer in {self.folder} makes no token of a letter. Fix: the tokenizer that the model was"
                " trained with"
            )
        facts = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        size = facts.get("vocab_size") or (facts.get("text_config") or {}).get("vocab_size")
        # Tokens that were added may lie beyond, as long as nothing writes them.
        own = self._backend.get_vocab(with_added_tokens=False)
        written = self._after_sentinel([{"role": "user", "content": "x"}], add_generation_prompt=True)
        last = max([*own.values(), *self._encode(written, ()).tolist()])
        if size is not None and last >= size:
            raise ConfigError(
                f"the tokenizer in {self.folder} has token {last} ({self.tokenizer.convert_ids_to_tokens(last)!r}), and"
                f" the model knows {size} by config.json. Fix: the tokenizer that the model was trained with"
            )

    def _plain_messages(
        self, messages: Sequence[Message], images: Sequence[np.ndarray]
    ) -> tuple[list[Message], tuple[int, ...]]:
        """The messages as the template takes them, text parts joined where no image is among them, and the number of
        tokens of each image.

        Raises ConfigError for an image that a text model cannot see."""
        if self._vision is None and len(images):
            raise self._no_images()
        plain: list[Message] = []
        counts: list[int] = []
        for message in messages:
            # A message of tool calls may have none.
            content = message.get("content")
            if not isinstance(content, list):
                plain.append({**message, "content": self._text(content)} if isinstance(content, str) else message)
            elif all(part.get("type") == "text" for part in content):
                plain.append({**message, "content": self._text("".join(part["text"] for part in content))})
            elif self._vision is None:
                raise self._no_images()
            else:
                shown = [
                    {"type": "image"} if part.get("type") == "image" else {**part, "text": self._text(part["text"])}
                    for part in content
                ]
                plain.append({**message, "content": shown})
                counts += [self._vision.tokens(part["image"]) for part in content if part.get("type") == "image"]
        return plain, tuple(counts)

    def _text(self, text: str) -> str:
        """`text` without the image token: a response that held one, shown again as history, is no image."""
        # Or the template's text would hold more image tokens than there are images.
        return text if self._image_text is None else text.replace(self._image_text, "")

    def _no_images(self) -> ConfigError:
        return ConfigError(
            f"{self.folder} is taken as a text model, but a message holds an image. Fix: a text rendering of the"
            " environment"
        )


def _chat_of(folder: Path, trust_remote_code: bool, args: dict[str, Any]) -> HfChat:
    return HfChat(folder, trust_remote_code).with_args(args)


def _key(messages: Sequence[Message]) -> Hashable:
    """Equal for equal messages; fields other than role and content (tool calls) by their JSON."""
    return tuple(
        (
            (message.get("role"), message["content"])
            if len(message) == 2 and isinstance(message.get("content"), str)
            else json.dumps(message, sort_keys=True)
        )
        for message in messages
    )


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer as the folder means it: exactly its tokenizer.json where it names no architecture's class, else by
    `AutoTokenizer` (which would rebuild the pipeline for some architectures, see `tokenizers.save_tokenizer`)."""
    settings = folder / "tokenizer_config.json"
    named = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") if settings.is_file() else None
    as_it_is = named in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()
    if as_it_is:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
