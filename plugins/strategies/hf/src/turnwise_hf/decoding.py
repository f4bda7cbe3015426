"""Sampling one batch of prompts to the end: equal prompts once, a shared beginning once, then a token per row and
step."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from turnwise.contracts.inference import GeneratingArgs
from turnwise.errors import EngineError
from turnwise_hf.cache import RowCache
from turnwise_hf.sampling import Rules, draw
from turnwise_torch.vision import Vision, embedded

_PREFILL_TOKENS = 16384
"""Padded tokens of one prefill pass at most (a single longer prompt is one pass): bounds memory, and pads short prompts by little."""
_SHARED = 8
"""A common beginning of fewer tokens is not worth a pass of its own."""
_RESERVED = 16
"""Positions beyond the longest prompt that a cache starts with."""


@frozen(eq=False)
class Row:
    """One response to sample: `ids` int32 [p], p ≥ 1, at most `limit` ≥ 1 tokens. `stopped(ids) → bool` looks for stop
    strings after each token. `images`: those that stand in `ids`."""

    ids: np.ndarray
    limit: int
    seed: int
    args: GeneratingArgs
    stopped: Callable[[np.ndarray], bool] | None = None
    images: tuple[np.ndarray, ...] = ()


@frozen(eq=False)
class Sampled:
    """`ids` int32 [n], `logprobs` float32 [n], `versions` int32 [n], n ≥ 1 unless aborted; `finish` is stop, length or
    abort."""

    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: str


Gate = Callable[[], tuple[nn.Module, int]]
"""Called before every token: may wait, and returns the model and the version that sample the next token."""


def sample_batch(
    rows: Sequence[Row],
    gate: Gate,
    stop_ids: Sequence[int],
    aborted: Set[int] = frozenset(),
    vision: Vision | None = None,
) -> list[Sampled]:
    """Sample every row to its end, in one batch. Raises EngineError if logits are not finite.

    `aborted`: indices of rows that nobody waits for any more; it may grow meanwhile, from another thread. `vision`: the
    image side of the model, needed where rows hold images.

    The tokens of a row depend on its seed, ids and the weights alone, beyond rounding. When the gate brings another
    version, the keys and values of the old weights are dropped and everything read again, so a token's log-prob always
    belongs to its version's weights.
    """
    return _Batch(rows, gate, stop_ids, aborted, vision).run()


class _Batch:
    def __init__(
        self, rows: Sequence[Row], gate: Gate, stop_ids: Sequence[int], aborted: Set[int], vision: Vision | None
    ) -> None:
        self._rows, self._gate, self._aborted, self._vision = rows, gate, aborted, vision
        self._rules = Rules.of([row.args for row in rows], [row.seed for row in rows])
        self._limits = np.array([row.limit for row in rows])
        self._watched = [index for index, row in enumerate(rows) if row.stopped is not None]
        self._stops = np.array(sorted(stop_ids), np.int32)
        # Allocated once for the longest response: appending would copy at every step.
        longest = int(self._limits.max())
        self._tokens = np.zeros((len(rows), longest), np.int32)
        self._logprobs = np.zeros((len(rows), longest), np.float32)
        self._versions = np.zeros((len(rows), longest), np.int32)
        self._lengths = np.zeros(len(rows), np.int64)
        self._finish: list[str] = [""] * len(rows)

    def run(self) -> list[Sampled]:
        """Sample every row to its end."""
        model, version = self._gate()
        live = np.arange(len(self._rows))
        logits, order, cache = self._prefill(model, [row.ids for row in self._rows], live)
        live, lengths = live[order], np.array([len(self._rows[index].ids) for index in order], np.int64)
        running = np.ones(len(live), bool)
        step = 0
        while True:
            tokens, logprobs = draw(logits, self._rules.rows(live), step)
            self._record(live[running], tokens[running], logprobs[running], step, version)
            # Assigned through the mask: rows that have ended stay ended, and their old place in `live` stays right.
            running[running] = self._unfinished(live[running], tokens[running], step)
            if not running.any():
                return self._results()
            step += 1
            # Before every token, for weights may be published between any two.
            now = self._gate()
            # Keys and values of the old weights fit no token of the new ones (see sample_batch).
            if now != (model, version):
                (model, version), live = now, live[running]
                logits, order, cache = self._prefill(model, [self._sequence(index, step) for index in live], live)
                live = live[order]
                lengths = np.array([len(self._rows[index].ids) + step for index in live], np.int64)
                running = np.ones(len(live), bool)
                continue
            # Dropping rows copies the whole cache: only when a quarter of them is idle.
            if 4 * running.sum() <= 3 * len(live):
                keep = np.flatnonzero(running)
                cache.select(torch.from_numpy(keep).to(logits.device))
                live, lengths, tokens, running = live[keep], lengths[keep], tokens[keep], running[keep]
            logits = decode(model, cache, tokens, lengths)
            # A row that has finished but was not dropped writes the same place again and again.
            lengths = lengths + running

    def _prefill(
        self, model: nn.Module, prompts: list[np.ndarray], live: np.ndarray
    ) -> tuple[Tensor, np.ndarray, RowCache]:
        images = [self._rows[index].images for index in live]
        if not any(images):
            return prefill(model, prompts)
        assert self._vision is not None
        return prefill_images(model, prompts, images, self._vision)

    def _sequence(self, index: int, step: int) -> np.ndarray:
        return np.concatenate([self._rows[index].ids, self._tokens[index, :step]])

    def _record(self, live: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, step: int, version: int) -> None:
        if not np.isfinite(logprobs).all():
            raise EngineError(
                "the model's logits are not finite, so nothing can be sampled. Fix: look at the last updates (learning"
                " rate, dtype)"
            )
        self._tokens[live, step], self._logprobs[live, step], self._versions[live, step] = tokens, logprobs, version
        self._lengths[live] = step + 1

    def _unfinished(self, live: np.ndarray, tokens: np.ndarray, step: int) -> np.ndarray:
        """bool over `live`: which rows go on. Notes how the others ended."""
        stopped = np.isin(tokens, self._stops)
        if self._watched:
            for place in np.flatnonzero(~stopped & np.isin(live, self._watched)):
                # Stop strings are looked for in text, row by row: only in rows that have any.
                check = self._rows[live[place]].stopped
                stopped[place] = check is not None and check(self._tokens[live[place], : step + 1])
        full = self._limits[live] <= step + 1
        for place in np.flatnonzero(stopped | full):
            self._finish[live[place]] = "stop" if stopped[place] else "length"
        going = ~(stopped | full)
        if self._aborted:
            for place in np.flatnonzero(going & np.isin(live, list(self._aborted))):
                self._finish[live[place]] = "abort"
                going[place] = False
        return going

    def _results(self) -> list[Sampled]:
        return [
            Sampled(self._tokens[i, :n].copy(), self._logprobs[i, :n].copy(), self._versions[i, :n].copy(), finish)
            for i, (n, finish) in enumerate(zip(self._lengths.tolist(), self._finish))
        ]


def prefill(
    model: nn.Module, prompts: Sequence[np.ndarray], reserved: int = _RESERVED
) -> tuple[Tensor, np.ndarray, RowCache]:
    """Read all prompts (int32 [p], p ≥ 1). Each distinct prompt is computed once, and the beginning that all share
    once.

    Returns the logits [n, vocabulary] after each prompt's last token, `order` int64 [n] (batch row → index into
    `prompts`; rows are sorted by length), and the cache of these n rows.
    """
    # The members of a group begin with the same prompt.
    distinct: dict[bytes, int] = {}
    inverse = np.array([distinct.setdefault(prompt.tobytes(), len(distinct)) for prompt in prompts])
    first = np.unique(inverse, return_index=True)[1]
    lengths = np.array([len(prompts[index]) for index in first])
    by_length = np.argsort(lengths, kind="stable")
    unique = [prompts[first[index]] for index in by_length]
    lengths = lengths[by_length]
    # Rows are sorted by length, so that the chunks below pad by little.
    table = np.zeros((len(unique), lengths[-1]), np.int64)
    for row, prompt in zip(table, unique):
        row[: len(prompt)] = prompt
    cache = RowCache(len(unique), int(lengths[-1]) + reserved, model)
    ids = torch.from_numpy(table).to(next(model.parameters()).device)
    shared = _shared_beginning(table, int(lengths[0]))
    if shared:
        _forward(model, cache, ids[:1, :shared], cache.block(slice(0, 1), 0, shared))
        # Row 0 has read it for all.
        cache.broadcast(shared)
    logits = []
    for begin, end in _chunks(lengths - shared):
        length = int(lengths[end - 1])
        hidden = _forward(
            model, cache, ids[begin:end, shared:length], cache.block(slice(begin, end), shared, length - shared)
        )
        last = torch.from_numpy(lengths[begin:end] - shared - 1).to(hidden.device)
        logits.append(_head(model, hidden[torch.arange(end - begin, device=hidden.device), last]))
    every = torch.cat(logits) if len(logits) > 1 else logits[0]
    rank = np.argsort(by_length)[inverse]  # prompt → its row in the table
    # Stable, so that equal prompts stay in the order in which they came.
    order = np.argsort(rank, kind="stable")
    if len(unique) < len(prompts):
        source = torch.from_numpy(rank[order]).to(every.device)
        cache.select(source)
        every = every.index_select(0, source)
    return every, order, cache


def prefill_images(
    model: Any,
    prompts: Sequence[np.ndarray],
    images: Sequence[Sequence[np.ndarray]],
    vision: Vision,
    reserved: int = _RESERVED,
) -> tuple[Tensor, np.ndarray, RowCache]:
    """As `prefill`, for a batch in which some prompts hold images. Every prompt is read by itself: images make equal
    ids different."""
    lengths = np.array([len(prompt) for prompt in prompts])
    order = np.argsort(lengths, kind="stable")
    cache = RowCache(len(prompts), int(lengths.max()) + reserved, model)
    device = next(model.parameters()).device
    shift = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    logits = []
    for row, index in enumerate(order):
        ids = torch.from_numpy(prompts[index].astype(np.int64))[None].to(device)
        _, mask = cache.block(slice(row, row + 1), 0, ids.shape[1])
        found, shown = vision.find(prompts[index], images[index])
        pixels = vision.pixels(shown, device)
        if pixels is None:
            given = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1], device=device)[None]}
        else:
            embeddings, places, shift[row : row + 1] = embedded(
                model.base_model, ids, pixels, torch.from_numpy(found)[None].to(device)
            )
            given = {"inputs_embeds": embeddings, "position_ids": places}
        output = model.base_model(attention_mask=mask, past_key_values=cache, use_cache=True, **given)
        logits.append(_head(model, output.last_hidden_state[:, -1]))
    cache.shift = shift
    return torch.cat(logits), order, cache


def decode(model: nn.Module, cache: RowCache, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
    """Feed one token per row, `tokens` int32 [n] at `positions` int64 [n]; the logits [n, vocabulary] after it."""
    ids = torch.from_numpy(tokens.astype(np.int64))[:, None].to(next(model.parameters()).device)
    return _head(model, _forward(model, cache, ids, cache.at(positions))[:, 0])


def _forward(model: Any, cache: RowCache, ids: Tensor, place: tuple[Tensor, Tensor]) -> Tensor:
    position_ids, mask = place
    position_ids, mask = position_ids.expand(len(ids), -1), mask.expand(len(ids), -1, -1, -1)
    output = model.base_model(
        input_ids=ids, position_ids=position_ids, attention_mask=mask, past_key_values=cache, use_cache=True
    )
    return output.last_hidden_state


def _head(model: Any, hidden: Tensor) -> Tensor:
    return model.get_output_embeddings()(hidden)


def _shared_beginning(table: np.ndarray, shortest: int) -> int:
    """How many first tokens all rows share, leaving each at least one; 0 if that is too few to matter."""
    if len(table) == 1:
        return 0
    # The last token of every prompt is computed by itself: its logits are what sampling begins with.
    equal = (table[:, : shortest - 1] == table[0, : shortest - 1]).all(axis=0)
    shared = int(len(equal) if equal.all() else equal.argmin())
    return shared if shared >= _SHARED else 0


def _chunks(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Cuts of ascending `lengths` into runs of at most `_PREFILL_TOKENS` padded tokens each."""
    cuts, begin = [], 0
    for end in range(1, len(lengths) + 1):
        # Lengths ascend, so the last row's is what the others are padded to.
        if end == len(lengths) or (end + 1 - begin) * lengths[end] > _PREFILL_TOKENS:
            cuts.append((begin, end))
            begin = end
    return cuts
