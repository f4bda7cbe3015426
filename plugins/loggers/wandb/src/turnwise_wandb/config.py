"""The options of the wandb logger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import field, frozen

from turnwise.contracts.tracker import TrackerConfig, keys_in_the_file
from turnwise.errors import Problem

LOGIN = ("wandb login", "WANDB_API_KEY")
"""Where a key belongs: the command, the variable."""


@frozen
class WandbConfig(TrackerConfig):
    """Those of every tracker, and `entity`, `notes` as `wandb.init` has them. `mode` none: the service's own choice
    (WANDB_MODE, `wandb offline`), else online. `settings`: further ones of `wandb.Settings`; a key among them is
    refused."""

    entity: str | None = None
    notes: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    settings: Mapping[str, Any] = field(factory=dict, repr=False)

    def check(self, run: Any) -> Iterator[Problem]:
        """A key in the file is refused."""
        yield from keys_in_the_file({"api_key": self.api_key, "settings.api_key": self.settings.get("api_key")}, *LOGIN)
