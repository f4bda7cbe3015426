"""A KV cache with a write position per row: ragged prompts without left padding, on unmodified models of
transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

# Growing copies the whole cache: by less it would be copied at almost every token.
_ROOM = 32
"""Positions added when a cache is full, at least: decoding does not reserve the longest response for every row."""


class RowCache(Cache):
    """Keys and values [rows, heads, positions, head size] per layer, as one pair of tensors each, in the model's dtype
    on its device.

    A forward pass is announced by `at` (each row its own position, one token) or `block` (some rows, the same
    positions), which give the position ids and the attention mask for the model; the layers then write and read by
    `update`. Nothing is ever moved, so a row may stay between the turns of an episode and take the next observation's
    tokens.
    """

    def __init__(self, rows: int, capacity: int, model: torch.nn.Module) -> None:
        # Not the parent's: it holds the layers' storage, which this class replaces.
        config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
        weight = next(model.parameters())
        self.layers: list[Any] = []
        self._eager = config._attn_implementation == "eager"
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (rows, heads, capacity, head_size)
        # Zeros and not empty memory: a masked position still enters the products, and 0 · NaN is NaN.
        self._keys = [weight.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self._values = [weight.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self._rows, self._end = slice(None), 0
        self._positions: Tensor | None = None
        self._every = torch.arange(rows, device=weight.device)
        self._start = 0
        self.shift: Tensor | None = None
        """int64 [rows]: by how much a row's next position id differs from its number of tokens, where images came before; None: nowhere."""

    @property
    def capacity(self) -> int:
        """Positions per row."""
        return int(self._keys[0].shape[2])

    def block(self, rows: slice, start: int, length: int) -> tuple[Tensor, Tensor]:
        """The next pass writes positions start…start+length of `rows`. Position ids [1, length], causal mask [1, 1,
        length, start+length]."""
        self._rows, self._positions, self._start, self._end = rows, None, start, start + length
        position_ids = torch.arange(start, self._end, device=self._every.device)[None]
        return position_ids, self._mask(position_ids)

    def at(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """The next pass writes one token per row, at `positions` int64 [rows]. Position ids [rows, 1], mask [rows, 1,
        1, longest]."""
        self._rows, self._end = slice(None), int(positions.max()) + 1
        self._grow(self._end)
        self._positions = torch.from_numpy(positions).to(self._every.device)
        places = self._positions[:, None]
        return places if self.shift is None else places + self.shift[:, None], self._mask(places)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, tokens, head size] of one layer; give all keys and values up to the end of the pass."""
        # Rows are a slice and never a list of indices: these are views, and writing into a copy would be lost.
        keys, values = self._keys[layer_idx][self._rows], self._values[layer_idx][self._rows]
        if self._positions is None:
            keys[:, :, self._start : self._end] = key_states
            values[:, :, self._start : self._end] = value_states
        else:
            keys[self._every, :, self._positions] = key_states[:, :, 0]
            values[self._every, :, self._positions] = value_states[:, :, 0]
        return keys[:, :, : self._end], values[:, :, : self._end]

    def broadcast(self, length: int) -> None:
        """Copy the first `length` positions of row 0 to every row."""
        for layer in (*self._keys, *self._values):
            layer[1:, :, :length] = layer[:1, :, :length]

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (int64, repeats allowed) in this order."""
        self._keys = [layer.index_select(0, rows) for layer in self._keys]
        self._values = [layer.index_select(0, rows) for layer in self._values]
        self._every = torch.arange(len(rows), device=rows.device)
        if self.shift is not None:
            self.shift = self.shift.index_select(0, rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked for by models that make positions of their own; here they are given."""
        return self._end if self._positions is not None else self._start

    def _grow(self, length: int) -> None:
        if length > self.capacity:
            more = max(_ROOM, length - self.capacity)
            self._keys = [torch.nn.functional.pad(layer, (0, 0, 0, more)) for layer in self._keys]
            self._values = [torch.nn.functional.pad(layer, (0, 0, 0, more)) for layer in self._values]

    def _mask(self, position_ids: Tensor) -> Tensor:
        visible = (torch.arange(self._end, device=position_ids.device) <= position_ids[..., None])[:, None]
        # Eager attention adds its mask to the scores; sdpa takes one of truth values.
        if not self._eager:
            return visible
        dtype = self._keys[0].dtype
        return torch.zeros((), dtype=dtype, device=visible.device).where(visible, torch.finfo(dtype).min)
