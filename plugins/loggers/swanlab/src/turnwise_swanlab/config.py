"""The options of the swanlab logger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import field, frozen

from turnwise.contracts.tracker import TrackerConfig, keys_in_the_file
from turnwise.errors import Problem

LOGIN = ("swanlab login", "SWANLAB_API_KEY")
"""Where a key belongs: the command, the variable."""
SPELLINGS = {"name": "experiment_name", "description": "notes"}
"""Options that SwanLab itself takes by two names."""


@frozen
class SwanlabConfig(TrackerConfig):
    """Those of every tracker, and `workspace`, `description` (or `notes`), `experiment_name` (or `name`) as `swanlab.init`
    has them. `mode` none: the service's own choice (SWANLAB_MODE), else online. `login_kwargs`: refused."""

    workspace: str | None = None
    experiment_name: str | None = None
    description: str | None = None
    notes: str | None = None
    mode: Literal["online", "cloud", "offline", "disabled"] | None = None
    login_kwargs: Mapping[str, Any] = field(factory=dict, repr=False)

    def check(self, run: Any) -> Iterator[Problem]:
        """A key in the file is refused, and so are two values for one option."""
        yield from keys_in_the_file(
            {"api_key": self.api_key, "login_kwargs.api_key": self.login_kwargs.get("api_key")}, *LOGIN
        )
        for key in self.login_kwargs:
            if key != "api_key":
                fix = "Fix: remove it; `swanlab login --host`, or the environment variable SWANLAB_API_HOST, names a server"
                yield Problem(f"login_kwargs.{key}", f"nothing logs in from a file. {fix}")
        for one, other in SPELLINGS.items():
            if getattr(self, one) is not None and getattr(self, other) is not None:
                yield Problem(other, f"is {one}, which stands here too. Fix: keep one")
