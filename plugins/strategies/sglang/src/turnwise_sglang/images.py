"""Images for SGLang: each as a PNG, with one token in the prompt that SGLang replaces by as many as the image has."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import EnvironmentFailure, Problem
from turnwise_serving.models import sees
from turnwise_sglang.config import SglangConfig

if TYPE_CHECKING:
    from turnwise_torch.vision import Vision


def problems(config: SglangConfig, context: InferenceContext) -> list[Problem]:
    """What keeps the server from a model that takes images: of a server of ours the cache of their features is off."""
    if config.base_url is None or not sees(context.model):
        return []
    where = "actor_infer.strategy_args.strategy_config.base_url"
    return [
        Problem(
            where,
            "an attached SGLang server may keep features of images from old weights. Fix: python in place of base_url",
        )
    ]


class Images:
    """From a request's ids and images to SGLang's, for the model in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def _vision(self) -> Vision:
        from turnwise_torch.vision import Vision

        return Vision(self._folder)

    def fields(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> dict[str, Any]:
        """`input_ids` and `image_data` for ids [n] and images uint8 [H, W, 3]. Raises EngineError: they do not belong
        together, or the model's images are not understood; EnvironmentFailure: the model itself wrote an image's
        token."""
        mask = self._vision.in_prompt(ids, images)
        if (ids[~mask] == self._vision.token).any():
            # One odd response ends its episode, not the run.
            raise EnvironmentFailure(
                "the prompt holds an image token that the model sampled, which SGLang would take for an image. Fix: hf"
                " or vllm"
            )
        # The first token of each image stays: SGLang replaces it by as many as the image has.
        inside = mask & np.concatenate([[False], mask[:-1]])
        return {"input_ids": ids[~inside].tolist(), "image_data": [_png(image) for image in images]}


def _png(image: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    # PNG keeps every pixel; level 1, for the way is short and the time counts.
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
