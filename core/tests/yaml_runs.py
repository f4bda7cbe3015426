"""What loading a small YAML says, for tests; the fixture `run_yaml` writes and loads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from turnwise.config import Loaded
from turnwise.errors import ConfigError

Run = Callable[..., Loaded]


def problems(run: Run, text: str = "", *overrides: str, base: bool = True) -> list[str]:
    """The lines of a refusal."""
    with pytest.raises(ConfigError) as caught:
        run(text, *overrides, base=base)
    return caught.value.problems
