"""What a model's folder says of itself, and how engines spell it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Our names of dtypes, and those of torch and the engines."""


def facts(folder: Path) -> dict[str, Any]:
    """The folder's config.json, with the language model's part on top. Raises OSError, ValueError."""
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(whole, dict):
        raise ValueError(f"{folder / 'config.json'} is no mapping")
    # A vision-language model keeps the sizes of its language model in a mapping of its own.
    return {**whole, **{name: value for name, value in (whole.get("text_config") or {}).items() if value is not None}}


def vocabulary(folder: Path) -> int:
    """Ids of the model: those outside kill an engine. Raises ConfigError: no language model's folder."""
    try:
        return int(facts(folder)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} is no language model's folder (config.json without vocab_size). Fix: name another pretrain"
        ) from error


def sees(folder: Path | None) -> bool:
    """Whether the model takes images; False for a folder that is not prepared yet (none, or the empty path)."""
    try:
        return folder not in (None, Path()) and "vision_config" in facts(Path(str(folder)))
    except (OSError, ValueError):
        return False


def other_model(context: InferenceContext, named: str) -> str:
    """Why a server of the model `named` cannot serve this run: nobody will send it whole weights. Empty: it can."""
    # A run that sends whole weights replaces whatever the server holds.
    if not context.needs_its_model or context.is_model(named):
        return ""
    return "only adapters will be sent" if context.lora is not None else "no weights will be sent"
