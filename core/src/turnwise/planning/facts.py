"""What a model's config.json gives without its weights: parameters, and the bytes of a token in the KV cache, in
training, and of an image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.data.numbers import BYTES

# What config.json does not say: these architectures have biases of q, k and v, or norms of q and k, always.
BIASED, QK_NORMED = ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text"), ("qwen3",)
KNOWN = (*BIASED, *QK_NORMED, "llama", "mistral")


@frozen
class ImageFacts:
    """An image tower by its sizes. A token of the prompt that stands for a piece of an image is `patches` patches of
    `side`² pixels, of which the tower reads `values` numbers each (all channels, and the frames that a patch spans)."""

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    patches: int
    side: int
    values: int

    @property
    def pixel_bytes(self) -> int:
        """The pixels behind one token in main memory: red, green and blue, a byte each."""
        return self.patches * self.side**2 * 3

    def device_bytes(self, tokens: int, dtype: str, *, trainable: bool, kept: bool) -> int:
        """At most, for `tokens` tokens all of images: the patches in fp32, and what the tower keeps (as
        `ModelFacts.activation_bytes`); without gradients the activations of one layer."""
        layer = 6 * self.hidden + 2 * self.hidden + 3 * self.intermediate
        inside = layer if not trainable else self.layers * layer if kept else self.layers * self.hidden + layer
        return tokens * self.patches * (4 * self.values + inside * BYTES[dtype])


@frozen
class ModelFacts:
    """A dense decoder by its sizes; `image`: its image tower. `kv_heads` and `head` give the width of keys and
    values."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    image: ImageFacts | None = None

    @property
    def parameters(self) -> int:
        """Every weight once: embeddings (twice unless tied), layers, the final norm, and the image tower."""
        query, value = self.heads * self.head, self.kv_heads * self.head
        attention = (
            self.hidden * (2 * query + 2 * value)
            + (query + 2 * value) * self.attention_bias
            + self.hidden * self.output_bias
        )
        mlp = 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias
        # Two norms a layer; with qk_norm one for queries and one for keys, of a head's width each.
        layer = attention + mlp + 2 * self.hidden + 2 * self.head * self.qk_norm
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden + (self.image.parameters if self.image is not None else 0)

    def kv_bytes(self, dtype: str) -> int:
        """Keys and values of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head * BYTES[dtype]

    def activation_bytes(self, tokens: int, dtype: str, *, kept: bool, scores: int = 0) -> int:
        """An estimate of what a forward pass keeps for the backward pass over `tokens` tokens of one micro-batch.

        A layer keeps of each of its two norms what came in, what it scaled and what came out (6·hidden), queries, keys
        and values, the attention's output as the kernel and as the projection want it, and of the MLP gate, its
        activation, up and their product (4·intermediate); recomputed (`kept` False), every layer keeps its input and one
        layer keeps all that. `scores`: pairs of positions of one head whose attention is written out, twice a layer and
        three times more where it is computed, in fp32.
        """
        width = BYTES[dtype]
        layer = 6 * self.hidden + 3 * self.heads * self.head + 2 * self.kv_heads * self.head + 4 * self.intermediate
        inside = self.layers * layer if kept else self.layers * self.hidden + layer
        written = (2 * self.layers if kept else 2) + 3
        return tokens * inside * width + 4 * written * self.heads * scores


def find_config(pretrain: Any, base: Path) -> Path | None:  # Any: a path, an id or a recipe
    """The config.json of `pretrain`: in its folder (also beside the YAML), else among the facts that ship in
    examples/models, by the model's name."""
    if not isinstance(pretrain, str):
        return None
    name = pretrain.rstrip("/").rpartition("/")[2]
    # Weights need not be here to count them: `plan` runs on a laptop.
    places = [Path(pretrain), base / pretrain, base / "models" / name, Path("examples/models") / name]
    return next((place / "config.json" for place in places if name and (place / "config.json").is_file()), None)


def read_facts(path: Path) -> ModelFacts | None:
    """The facts of a config.json; None for an architecture that is not counted here, or a file that is not one."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        return _facts(whole)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _facts(whole: Mapping[str, Any]) -> ModelFacts | None:
    # A vision-language model keeps its language model's sizes in a mapping of its own.
    text: Mapping[str, Any] = whole.get("text_config") or whole
    kind = str(whole["model_type"])
    if kind not in KNOWN:
        return None
    heads = int(text["num_attention_heads"])
    hidden = int(text["hidden_size"])
    # Qwen2 has biases on q, k and v alone, whatever the file says.
    bias = bool(text.get("attention_bias", False)) and kind not in BIASED
    return ModelFacts(
        hidden=hidden,
        intermediate=int(text["intermediate_size"]),
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head=int(text.get("head_dim") or hidden // heads),
        vocabulary=int(text["vocab_size"]),
        tied=bool(whole.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        attention_bias=kind in BIASED or bias,
        output_bias=bias,
        mlp_bias=bool(text.get("mlp_bias", False)) and kind == "llama",
        qk_norm=kind in QK_NORMED,
        image=_vision(whole["vision_config"]) if kind == "qwen2_5_vl" else None,
    )


def _vision(config: Mapping[str, Any]) -> ImageFacts:
    """The image tower of Qwen2.5-VL: patches, blocks with biases, and the merger of 2 × 2 patches."""
    hidden, inner, out = int(config["hidden_size"]), int(config["intermediate_size"]), int(config["out_hidden_size"])
    channels = int(config.get("in_channels") or config.get("in_chans") or 3)
    side, depth = int(config["patch_size"]), int(config["depth"])
    values = channels * int(config["temporal_patch_size"]) * side**2
    block = 4 * hidden * hidden + 4 * hidden + 3 * hidden * inner + 2 * inner + hidden + 2 * hidden
    patches = int(config["spatial_merge_size"]) ** 2
    merged = hidden * patches
    parameters = values * hidden + depth * block + hidden + merged * merged + merged + merged * out + out
    return ImageFacts(parameters, hidden, inner, depth, patches, side, values)
