"""Images as vLLM's engine takes them: pixel values of the trainer's own processor, and where in the prompt's ids they
stand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from turnwise_serving.engine import turnwise_child


@frozen(eq=False)
class Picture:
    """One image of a prompt: its run of ids (`offset`, `length`), `values` float32 [patches, features], `grid` int64
    [3], `digest` of its pixels."""

    offset: int
    length: int
    values: Any
    grid: Any
    digest: str


class Pictures:
    """From a request's images to their places and pixels, for the model in one folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: a model whose images are not understood (turnwise_torch.vision)."""
        from turnwise_torch.vision import Vision

        self._vision = Vision(folder)

    def of(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> list[Picture]:
        """The images, in order of the ids [n]. Raises EngineError: ids and images do not belong together."""
        import torch

        from turnwise_torch.vision import digest

        places, out = iter(np.flatnonzero(self._vision.in_prompt(ids, images)).tolist()), []
        for image in images:
            # The mask holds all tokens of an image: the first is its place, the others are passed over.
            offset, length = next(places), self._vision.tokens(image)
            for _ in range(length - 1):
                next(places)
            pixels = self._vision.pixels([image], torch.device("cpu"))
            assert pixels is not None
            out.append(Picture(offset, length, pixels.values, pixels.grid[0], digest(image)))
        return out


def items(pictures: Sequence[Picture]) -> Any:
    """vLLM's `MultiModalKwargsItems` of them, with the fields that its Qwen2-VL models read."""
    import torch
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    grids = torch.stack([picture.grid for picture in pictures])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    values = torch.cat([picture.values for picture in pictures])
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature({"pixel_values": values, "image_grid_thw": grids}), fields)


def engine_input(ids: list[int], pictures: Sequence[Picture]) -> Any:
    """A prompt for `AsyncLLM.generate`, which nothing of vLLM's processes any more."""
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import PlaceholderRange

    if not pictures:
        return tokens_input(ids)
    places = [PlaceholderRange(offset=picture.offset, length=picture.length) for picture in pictures]
    # vLLM finds an image's features in its cache by this name, so equal pixels have equal ones.
    return mm_input(ids, items(pictures), {"image": [picture.digest for picture in pictures]}, {"image": places})


def features(pictures: Sequence[Picture]) -> dict[str, Any]:
    """The same for the server's route /inference/v1/generate."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

    return {
        "mm_hashes": {"image": [picture.digest for picture in pictures]},
        "mm_placeholders": {"image": [{"offset": picture.offset, "length": picture.length} for picture in pictures]},
        "kwargs_data": {"image": [encode_mm_kwargs_item(item) for item in items(pictures)["image"]]},
    }


def declare_torchvision() -> None:
    """What a CPU build of torch lacks for torchvision's wheel, declared before torchvision is imported: in this
    process, and in the one in which vLLM inspects a model's class, which knows nothing of this one."""
    if not turnwise_child.declare_torchvision():
        return
    from vllm.model_executor.models import registry

    # vLLM looks at a model's class in a process of its own, once for a cache folder: its program is replaced by one
    # that declares them, too.
    registry._SUBPROCESS_COMMAND = [sys.executable, "-m", "turnwise_vllm.inspection"]
