"""A model without torch: characters as tokens, a softmax bigram as the network, so that a whole run learns in seconds
on numpy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from attrs import frozen

from turnwise.contracts.chat import Message, ModelSourceContext
from turnwise.contracts.inference import BackendCapabilities, DeviceMemory, InferenceContext, Request
from turnwise.contracts.train import Offer, TrainContext
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.data.trajectory import Generation, float32, int32
from turnwise.errors import CheckpointError, ConfigError, Problem, TrainerError, did_you_mean

END, IMAGE, VOCABULARY = 256, 257, 262
ROLES = {"system": 258, "user": 259, "assistant": 260, "tool": 261}
"""Ids 0–255 are the bytes of UTF-8; then the end of a message, an image, and one header per role."""

# More than one, so that a count of images is no count of their tokens.
IMAGE_TOKENS = 4


class FakeChat:
    """A chat format without a tokenizer: header id, one id per byte, end id; an image is four ids.

    `end`: the id that ends a message, for an engine whose vocabulary is small.
    """

    def __init__(self, end: int = END) -> None:
        self.stop_ids: tuple[int, ...] = (end,)

    def with_args(self, args: Mapping[str, Any]) -> FakeChat:
        """Itself; there is no template that could read an argument."""
        if args:
            raise ConfigError(f"template_args: the fake chat reads none of {', '.join(args)}. Fix: leave them out")
        return self

    def render(
        self,
        messages: Sequence[Message],
        images: Sequence[np.ndarray] = (),
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> np.ndarray:
        """int32 ids of the conversation, ending with the assistant's header."""
        return int32(self.ids_of(messages))

    def extend(
        self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """The end id if it was not sampled, then `messages`, then the assistant's header."""
        closed = len(ids) > 0 and int(ids[-1]) in self.stop_ids
        return int32([*([] if closed else self.stop_ids), *self.ids_of(messages)])

    def ids_of(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `messages` and of the assistant's header: what `render` and `extend` write, for a chat that writes
        something else."""
        ids: list[int] = []
        for message in messages:
            ids += [ROLES[message["role"]], *_content_ids(message["content"]), *self.stop_ids]
        return [*ids, ROLES["assistant"]]

    def continue_text(self, ids: np.ndarray, text: str) -> np.ndarray:
        """The bytes of `text`."""
        return int32(list(text.encode()))

    def decode(self, ids: np.ndarray, special: bool = False) -> str:
        """The text of the byte ids; every other id and the end are left out, or shown as their number."""
        text = b""
        for i in map(int, ids):
            if 0 <= i < END and i not in self.stop_ids:
                text += bytes([i])
            elif special:
                text += f"<|{i}|>".encode()
        return text.decode(errors="replace")

    def begins_image(self, ids: np.ndarray) -> bool:
        """Whether an image's id is among them."""
        return bool((np.asarray(ids) == IMAGE).any())


def _content_ids(content: Any) -> list[int]:
    if isinstance(content, str):
        return list(content.encode())
    ids: list[int] = []
    for part in content:
        ids += [IMAGE] * IMAGE_TOKENS if part["type"] == "image" else list(part["text"].encode())
    return ids


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def initial_weights(letters: str = "abcd", seed: int = 0) -> np.ndarray:
    """float64 [V, V]: row = the token before, column = the next; the letters and the end are likely, everything else is
    very unlikely."""
    weights = np.full((VOCABULARY, VOCABULARY), -10.0)
    weights[:, [*letters.encode(), END]] = 0.0
    # Unequal, so that greedy sampling has one answer.
    return weights + 0.01 * np.random.default_rng(seed).standard_normal(weights.shape)


def save_model(folder: Path, weights: np.ndarray) -> None:
    """Write a model folder that FakeModelSource accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "weights.npy", weights)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "turnwise_fake", "vocab_size": VOCABULARY}), encoding="utf-8"
    )


def load_model(folder: Path) -> np.ndarray:
    """The weights of a model folder. Raises CheckpointError."""
    try:
        weights: np.ndarray = np.load(folder / "weights.npy")
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{folder} is not a model folder of the fake source ({error}). Fix: name a folder that it exported."
        ) from error
    return weights


class FakeModelSource:
    """Prepares a bigram: `pretrain: fake`, a recipe `{letters: abcd}`, or a folder that a FakeStrategy exported."""

    def __init__(self, config: None, context: ModelSourceContext) -> None:
        self._context = context

    def prepare(self, pretrain: str | Mapping[str, Any]) -> Path:
        """The model folder. Raises ConfigError."""
        problems = self.check(pretrain)
        if problems:
            raise ConfigError(map(str, problems))
        if isinstance(pretrain, str) and pretrain != "fake":
            return Path(pretrain)
        recipe: Mapping[str, Any] = {} if isinstance(pretrain, str) else pretrain
        folder = self._context.cache / "fake_model"
        save_model(folder, initial_weights(str(recipe.get("letters", "abcd")), self._context.seed))
        return folder

    def check(self, pretrain: str | Mapping[str, Any]) -> list[Problem]:
        """Unknown recipe keys, or a folder that is not there."""
        if isinstance(pretrain, str):
            found = pretrain == "fake" or (Path(pretrain) / "weights.npy").is_file()
            text = f"{pretrain!r} is not a folder with weights.npy. Fix: name one, or write pretrain: fake."
            return [] if found else [Problem("pretrain", text)]
        return [
            Problem(
                f"pretrain.{key}",
                f"unknown key {key!r}.{did_you_mean(key, ['letters'])} Known: letters. Fix: correct or remove it",
            )
            for key in pretrain
            if key != "letters"
        ]

    def chat(self, folder: Path) -> FakeChat:
        """The chat format, the same for every folder."""
        return FakeChat()


@frozen
class FakeBackendConfig:
    """Seconds that every request takes (`delay`), and each of its tokens (`token`): weights may come between two."""

    delay: float = 0.0
    token: float = 0.0


class FakeBackend:
    """Samples from the bigram, from the whole distribution: of the generating arguments it knows the temperature and
    the limit alone."""

    input: Literal["ids", "messages"] = "ids"
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(updates_between_tokens=True)

    @staticmethod
    def transports(config: FakeBackendConfig, context: InferenceContext) -> tuple[str, ...]:
        """`fake`: a copy of the weights; `shared`: the weights themselves."""
        return ("fake", "shared")

    @staticmethod
    def check(config: FakeBackendConfig, context: InferenceContext) -> list[Problem]:
        """Nothing is wrong with it."""
        return []

    def receivers(self, transport: str) -> int:
        """One."""
        return 1

    def __init__(self, config: FakeBackendConfig, context: InferenceContext) -> None:
        self._config = config
        self._weights = initial_weights(seed=context.seed) if context.model is None else load_model(context.model)
        self._version = 0
        self._awake = asyncio.Event()
        self._awake.set()
        self.served = 0
        self.episodes = 0

    async def generate(self, request: Request) -> Generation:
        """Sample until the end id or `max_new_tokens`; equal seeds, weights and ids give equal tokens."""
        await asyncio.sleep(self._config.delay)
        await self._awake.wait()
        assert request.ids is not None
        generator = np.random.default_rng(request.seed)
        before = int(request.ids[-1])
        ids, versions, logprobs = list[int](), list[int](), list[float]()
        while len(ids) < request.max_new_tokens and END not in ids[-1:]:
            if self._config.token:
                await asyncio.sleep(self._config.token)
                await self._awake.wait()
            scores = log_softmax(self._weights[before] / (request.args.temperature or 1.0))
            chosen = int(
                scores.argmax() if request.args.temperature == 0 else generator.choice(VOCABULARY, p=np.exp(scores))
            )
            ids.append(chosen)
            logprobs.append(float(scores[chosen]))
            versions.append(self._version)
            before = chosen
        self.served += 1
        finish: Literal["stop", "length"] = "stop" if END in ids[-1:] else "length"
        return Generation(FakeChat().decode(int32(ids)), int32(ids), float32(logprobs), int32(versions), finish)

    def live(self, episodes: int) -> None:
        """Remember the number of running episodes."""
        self.episodes = episodes

    async def receive(self, offer: Offer) -> int:
        """Take the weights of the offer."""
        self._weights = offer.payload["weights"]
        self._version = offer.version
        return self._version

    async def pause(self) -> None:
        """Hold requests that have not started, and those that wait for their next token."""
        self._awake.clear()

    async def resume(self) -> None:
        """Go on."""
        self._awake.set()

    async def abort(self, request: Request) -> None:
        """Nothing to drop: what a request has sampled is its own."""

    async def sleep(self) -> None:
        """Nothing to give back."""

    async def wake(self, what: DeviceMemory) -> None:
        """Nothing to take again."""

    async def close(self) -> None:
        """Let waiting requests end."""
        self._awake.set()


class FakeStrategy:
    """Trains the bigram by plain gradient steps on −coef·A·log-prob, whatever loss is named, with the KL (k3) and
    entropy terms.

    With `head: value` it trains one value per preceding token on coef·½(V − return)².
    """

    @staticmethod
    def transports(config: None, context: TrainContext) -> tuple[str, ...]:
        """`fake`: a copy of the weights; `shared`: the weights themselves."""
        return ("fake", "shared")

    @staticmethod
    def check(config: None, context: TrainContext) -> list[Problem]:
        """Nothing is wrong with it."""
        return []

    def __init__(self, config: None, context: TrainContext) -> None:
        self._context = context
        self._weights = load_model(context.model)
        self._values = np.zeros(VOCABULARY)
        self._updates = 0

    def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: log-prob of every sampled token."""
        before, token = _pairs(rows)
        return float32(self._scores(before)[np.arange(len(token)), token])

    def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the value of the token before every sampled one."""
        return float32(self._values[_pairs(rows)[0]])

    def _scores(self, before: np.ndarray) -> np.ndarray:
        return log_softmax(self._weights[before] / self._context.temperature)

    def update(self, update: Update) -> UpdateResult:
        """One gradient step, clipped to `max_grad_norm`. Raises TrainerError."""
        if not self._context.trainable:
            raise TrainerError(f"{self._context.role} is frozen and cannot be updated.")
        value_head = self._context.head == "value"
        loss, gradient, sums = self._value_step(update) if value_head else self._policy_step(update)
        norm = float(np.sqrt((gradient**2).sum()))
        if not np.isfinite(norm + loss):
            return UpdateResult(loss, norm, skipped=True)
        step = update.lr * gradient * min(1.0, self._context.max_grad_norm / max(norm, 1e-12))
        if value_head:
            self._values -= step
        else:
            self._weights -= step  # in place: a backend with shared weights sees it
        self._updates += 1
        return UpdateResult(loss, norm, sums)

    def _policy_step(self, update: Update) -> tuple[float, np.ndarray, dict[str, tuple[float, float]]]:
        rows, columns = update.rows, update.rows.columns
        before, token = _pairs(rows)
        scores = self._scores(before)
        probabilities = np.exp(scores)
        new = scores[np.arange(len(token)), token]
        entropy = -(probabilities * scores).sum(-1)
        reference = columns["ref_log_probs"] if update.kl_coef else new
        ratio = np.exp(np.clip(reference - new, -20, 20))
        loss = (
            -columns["advantages"] * new + update.kl_coef * (ratio - np.log(ratio) - 1) - update.entropy_coef * entropy
        )
        by_token = columns["coef"] * (-columns["advantages"] + update.kl_coef * (1 - ratio))
        per_logit = -by_token[:, None] * probabilities
        per_logit[np.arange(len(token)), token] += by_token
        # ∂(−H)/∂logit = p·(log p + H).
        per_logit += (columns["coef"] * update.entropy_coef)[:, None] * probabilities * (scores + entropy[:, None])
        gradient = np.zeros_like(self._weights)
        # Unbuffered: a token stands before several others, and indexing would keep only the last of their sums.
        np.add.at(gradient, before, per_logit / self._context.temperature)
        weight = columns.get("weight", np.ones(len(token)))
        old = (
            np.where(np.isnan(columns["old_log_probs"]), new, columns["old_log_probs"])
            if "old_log_probs" in columns
            else new
        )
        change = new - old
        per_token = {
            "policy/entropy": entropy,
            "policy/approx_kl": np.exp(change) - 1 - change,
            "policy/ratio_mean": np.exp(change),
        }
        sums = {name: (float((weight * value).sum()), float(weight.sum())) for name, value in per_token.items()}
        return float((columns["coef"] * loss).sum()), gradient, sums

    def _value_step(self, update: Update) -> tuple[float, np.ndarray, dict[str, tuple[float, float]]]:
        columns = update.rows.columns
        before, _ = _pairs(update.rows)
        miss = self._values[before] - columns["returns"]
        gradient = np.bincount(before, columns["coef"] * miss, VOCABULARY)
        return float((columns["coef"] * miss**2 / 2).sum()), gradient, {}

    def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """`fake`: a copy of the weights; `shared`: the weights themselves."""
        return Offer(transport, version, {"weights": self._weights if transport == "shared" else self._weights.copy()})

    def send(self, offer: Offer) -> None:
        """Nothing streams: the offer holds the weights."""

    def save(self, folder: Path) -> None:
        """Everything in one file."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "state.npz", weights=self._weights, values=self._values, updates=self._updates)

    def load(self, folder: Path) -> None:
        """Undo `save`. Raises CheckpointError."""
        try:
            with np.load(folder / "state.npz") as state:
                # In place, as a backend may share the array.
                self._weights[:], self._values[:] = state["weights"], state["values"]
                self._updates = int(state["updates"])
        except Exception as error:  # zipfile, OSError, KeyError: whatever is wrong with the file, it is not a state
            raise CheckpointError(
                f"{folder / 'state.npz'} cannot be read ({error}). Fix: resume from another checkpoint."
            ) from error

    def export(self, folder: Path) -> None:
        """A folder that FakeModelSource accepts."""
        save_model(folder, self._weights)

    def offload(self) -> None:
        """Nothing to give back."""

    def onload(self) -> None:
        """Nothing to take again."""

    def close(self) -> None:
        """Nothing to release."""


def _pairs(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """int64 [R] twice: the token before every sampled one, and the sampled one."""
    sampled = np.flatnonzero(rows.response_mask)
    return rows.input_ids[sampled - 1].astype(np.int64), rows.input_ids[sampled].astype(np.int64)
