"""Images for a vision-language model: how many tokens one becomes, its pixel values, and the positions of all tokens
around it."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from turnwise.errors import ConfigError, EngineError, listed

ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl")
"""Model types whose images are runs of one token and whose positions come from `get_rope_index` (Wang et al. 2024, arXiv 2409.12191)."""
# An image comes again with every later turn whose prompt holds it, and in each of the trainer's passes.
_KEPT = 512


def has_vision(folder: Path) -> bool:
    """Whether the model in `folder` has a vision tower."""
    return "vision_config" in _facts(Path(folder))


def digest(image: np.ndarray) -> str:
    """The same for equal images only."""
    # With the shape: the same bytes in other rows are another image.
    return hashlib.blake2b(image.tobytes() + repr(image.shape).encode(), digest_size=16).hexdigest()


@frozen(eq=False)
class Pixels:
    """The images of a micro-batch in order of its samples: `values` float32 [patches, features], `grid` int64 [images,
    3] (t, h, w in patches)."""

    values: Tensor
    grid: Tensor


class Vision:
    """The image side of one model folder, without its weights. Processed images are kept, the latest 512."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: another architecture, or no image processor in the folder."""
        from transformers import AutoImageProcessor

        facts = _facts(Path(folder))
        if facts.get("model_type") not in ARCHITECTURES:
            raise ConfigError(
                f"{folder} holds a {facts.get('model_type')} model, whose images are not understood. Fix: one of"
                f" {listed(ARCHITECTURES)}"
            )
        self.token = int(facts["image_token_id"])
        """The id that stands once for every merged patch of an image."""
        self._start = int(facts["vision_start_token_id"])
        # The vision tower joins a square of so many patches to one token.
        self._merged = int(facts["vision_config"].get("spatial_merge_size", 2)) ** 2
        try:
            # Pillow's processor: torchvision's gives other pixels, and is not there in every build of torch.
            self._processor: Any = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"{folder} has no image processor ({str(error).splitlines()[0]}). Fix: save the model's processor"
                " into it"
            ) from error
        self._known: OrderedDict[str, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def tokens(self, image: np.ndarray) -> int:
        """How many tokens `image` (uint8 H×W×3) becomes."""
        return int(self._processed(image)[1].prod()) // self._merged

    def pixels(self, images: Sequence[np.ndarray], device: torch.device) -> Pixels | None:
        """The images as the model takes them; None without any."""
        if not images:
            return None
        done = [self._processed(image) for image in images]
        values, grid = (
            torch.from_numpy(np.concatenate(parts)).to(device) for parts in ([v for v, _ in done], [g for _, g in done])
        )
        return Pixels(values, grid)

    def blank(self, device: torch.device) -> Pixels:
        """The pixels of one small black image."""
        # The least that Qwen2-VL's processor leaves as it is (min_pixels).
        pixels = self.pixels([np.zeros((56, 56, 3), np.uint8)], device)
        assert pixels is not None
        return pixels

    def starts(self, ids: np.ndarray) -> np.ndarray:
        """int64 [k]: where in `ids` [n] an image would begin, the places of its first token."""
        return np.flatnonzero((ids[:-1] == self._start) & (ids[1:] == self.token)) + 1

    def find(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """bool [n]: which of `ids` [n] stand for one of `images`, and those first images that do.

        An image is a run of its number of tokens after the start-of-image token. Tokens of that id elsewhere were
        sampled: they are text. Raises ConfigError where a start is followed by another number of tokens, or an image is
        cut.
        """
        mask = np.zeros(len(ids), np.bool_)
        found: list[np.ndarray] = []
        if not images:
            return mask, found
        for start in self.starts(ids):
            if len(found) == len(images):
                break
            end = start + self.tokens(images[len(found)])
            if end > len(ids) or (ids[start:end] != self.token).any() or (end < len(ids) and ids[end] == self.token):
                raise ConfigError(
                    f"image {len(found) + 1} of a sample is {end - start} tokens, its ids hold another number at"
                    f" {start}. Fix: rows of the model's own processor"
                )
            mask[start:end] = True
            found.append(images[len(found)])
        return mask, found

    def in_prompt(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """bool [n]: which of a prompt's `ids` stand for its `images`. Raises EngineError where they do not belong
        together."""
        try:
            mask, found = self.find(ids, images)
        except ConfigError as error:
            raise EngineError(f"the prompt does not fit its images: {error}") from error
        if len(found) != len(images):
            raise EngineError(f"the prompt holds {len(found)} of its {len(images)} images")
        return mask

    def _processed(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        key = digest(image)
        known = self._known.get(key)
        if known is None:
            done = self._processor(images=[image], return_tensors="np")
            known = np.asarray(done["pixel_values"], np.float32), np.asarray(done["image_grid_thw"], np.int64)
            self._known[key] = known
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return known


def embedded(backbone: Any, input_ids: Tensor, pixels: Pixels, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the language model is given for `input_ids` int64 [b, w], of which `mask` bool [b, w] are images: embeddings
    [b, w, hidden], position ids int64 [3, b, w] (time, height, width), and int64 [b] by how much the next position
    differs from the number of tokens."""
    embeddings = backbone.get_input_embeddings()(input_ids)
    features = torch.cat(list(backbone.get_image_features(pixels.values, pixels.grid).pooler_output)).to(
        embeddings.dtype
    )
    embeddings = embeddings.masked_scatter(mask[..., None], features)
    positions, shift = backbone.get_rope_index(
        input_ids, mask.to(torch.int32), image_grid_thw=pixels.grid, attention_mask=torch.ones_like(input_ids)
    )
    return embeddings, positions, shift.reshape(-1)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
