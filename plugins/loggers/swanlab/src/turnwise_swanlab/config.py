"""The options of the swanlab logger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from turnwise.contracts.logger import LoggerCapabilities
from turnwise.errors import Problem

NO_KEY = (
    "a key stands in no file. Fix: remove it, and run `swanlab login` or set the environment variable SWANLAB_API_KEY"
)
SPELLINGS = {"name": "experiment_name", "description": "notes"}
"""Options that SwanLab itself takes by two names."""


@frozen
class SwanlabConfig:
    """`project`, `workspace`, `name` (or `experiment_name`; none: `exp_name`), `description` (or `notes`), `tags`,
    `group`, `job_type`: as `swanlab.init` has them. `mode` none: the service's own choice (SWANLAB_MODE), else online.

    `trajectories`: the first so many of a step (0: none). `every`: those of training steps 0, every, 2·every, …; those
    of evaluations always. `system_metrics`: the hardware and its load. `init_timeout`, `finish_timeout`: seconds that
    the service has to begin the run, and to take what is left at its end. `login_kwargs`, `api_key`: refused.
    """

    capabilities = LoggerCapabilities(only_adds=True)

    project: str | None = None
    workspace: str | None = None
    name: str | None = None
    experiment_name: str | None = None
    description: str | None = None
    notes: str | None = None
    tags: tuple[str, ...] = ()
    group: str | None = None
    job_type: str | None = None
    mode: Literal["online", "cloud", "offline", "disabled"] | None = None
    trajectories: int = field(default=8, validator=validators.ge(0))
    every: int = field(default=10, validator=validators.ge(1))
    system_metrics: bool = True
    init_timeout: float = field(default=90.0, validator=validators.gt(0))
    finish_timeout: float = field(default=600.0, validator=validators.gt(0))
    login_kwargs: Mapping[str, Any] = field(factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)

    def check(self, run: Any) -> Iterator[Problem]:
        """A key in the file is refused: it would be copied with it. So are two values for one option."""
        if self.api_key:
            yield Problem("api_key", NO_KEY)
        if self.login_kwargs.get("api_key"):
            yield Problem("login_kwargs.api_key", NO_KEY)
        for key in self.login_kwargs:
            if key != "api_key":
                fix = "Fix: remove it; `swanlab login --host`, or the environment variable SWANLAB_API_HOST, names a server"
                yield Problem(f"login_kwargs.{key}", f"nothing logs in from a file. {fix}")
        for one, other in SPELLINGS.items():
            if getattr(self, one) is not None and getattr(self, other) is not None:
                yield Problem(other, f"is {one}, which stands here too. Fix: keep one")
