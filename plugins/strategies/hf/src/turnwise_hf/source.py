"""Where the model comes from: a folder, a hub id, or a recipe for a tiny local model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.contracts.chat import Chat, ModelSourceContext
from turnwise.errors import ConfigError, MachineError, Problem
from turnwise_hf.config import recipe_from, recipe_problems
from turnwise_hf.folder import folder_problems

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_CODE = ["*.py"]


class HfModelSource:
    """The model source `hf`."""

    def __init__(self, config: Any, context: ModelSourceContext) -> None:
        self._context = context
        self._chats: dict[Path, Chat] = {}

    def prepare(self, pretrain: str | Mapping[str, Any]) -> Path:
        """The model's folder. Raises ConfigError (not a model, a mistake in the recipe) or MachineError (cannot be
        fetched or written here)."""
        if isinstance(pretrain, Mapping):
            recipe = recipe_from(pretrain)
            from turnwise_hf.recipe import prepare_recipe

            context = self._context
            if context.tokenizer is not None:
                return prepare_recipe(recipe, (), context.seed, context.cache, context.tokenizer)
            return prepare_recipe(recipe, list(context.texts()), context.seed, context.cache)
        if problems := self.check(pretrain):
            raise ConfigError(map(str, problems))
        folder = Path(pretrain).expanduser()
        return folder if folder.exists() else self._fetch(pretrain)

    def check(self, pretrain: str | Mapping[str, Any]) -> list[Problem]:
        """What is known without torch and without the network. Whether a hub id exists shows when it is fetched."""
        if isinstance(pretrain, Mapping):
            return recipe_problems(pretrain)
        if not isinstance(pretrain, str) or not pretrain.strip():
            fix = "a folder, a hub id, or a recipe such as {recipe: {architecture: qwen2}}"
            return [Problem("pretrain", f"{pretrain!r} is no model. Fix: {fix}")]
        folder = Path(pretrain).expanduser()
        if not folder.exists() and _may_be_hub_id(pretrain):
            return []
        return [Problem("pretrain", text) for text in folder_problems(folder)]

    def chat(self, folder: Path) -> Chat:
        """The chat format of a prepared folder, built once. Raises ConfigError."""
        from turnwise_hf.chat import HfChat

        folder = Path(folder)
        if folder not in self._chats:
            self._chats[folder] = HfChat(folder, self._context.trust_remote_code)
        return self._chats[folder]

    def _fetch(self, name: str) -> Path:
        import huggingface_hub

        try:
            folder = Path(
                huggingface_hub.snapshot_download(name, allow_patterns=_FILES + _CODE * self._context.trust_remote_code)
            )
        # The hub client raises its own errors, its HTTP client's and the system's; whatever it was, the model is not
        # here.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise MachineError(
                f"pretrain: {name!r} is no folder here and could not be fetched as a hub id: {reason} "
                "Fix: correct the name, copy the model here and name its folder, or use a recipe"
            ) from error
        if problems := folder_problems(folder):
            raise ConfigError([f"$.pretrain: {text.replace(str(folder), f'{name} ({folder})')}" for text in problems])
        return folder


def _may_be_hub_id(name: str) -> bool:
    """`owner/name` or `name`, unless `owner` is a folder here: then a path was meant."""
    parent = Path(name).parent
    return bool(_HUB_ID.fullmatch(name)) and (parent == Path() or not parent.exists())
