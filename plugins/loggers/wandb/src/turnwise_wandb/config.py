"""The options of the wandb logger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from turnwise.contracts.logger import LoggerCapabilities
from turnwise.errors import Problem

NO_KEY = "a key stands in no file. Fix: remove it, and run `wandb login` or set the environment variable WANDB_API_KEY"


@frozen
class WandbConfig:
    """`project`, `entity`, `name` (none: `exp_name`), `tags`, `notes`, `group`, `job_type`: as `wandb.init` has them.
    `mode` none: the service's own choice (WANDB_MODE, `wandb offline`), else online. `settings`: further ones of
    `wandb.Settings`.

    `trajectories`: of the first so many of a step (0: none). `every`: those of training steps 0, every, 2·every, …;
    those of evaluations always. `system_metrics`: the load of the machine. `init_timeout`, `finish_timeout`: seconds
    that the service has to begin the run, and to take what is left at its end. `api_key`: refused.
    """

    capabilities = LoggerCapabilities(only_adds=True)

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    group: str | None = None
    job_type: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    settings: Mapping[str, Any] = field(factory=dict, repr=False)
    trajectories: int = field(default=8, validator=validators.ge(0))
    every: int = field(default=10, validator=validators.ge(1))
    system_metrics: bool = True
    init_timeout: float = field(default=90.0, validator=validators.gt(0))
    finish_timeout: float = field(default=600.0, validator=validators.gt(0))
    api_key: str | None = field(default=None, repr=False)

    def check(self, run: Any) -> Iterator[Problem]:
        """A key in the file is refused: it would be copied with it."""
        if self.api_key:
            yield Problem("api_key", NO_KEY)
        if self.settings.get("api_key"):
            yield Problem("settings.api_key", NO_KEY)
