"""Puts this folder's fakes on the import path (the suite runs in importlib mode), and builds either manager."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.env_manager import ManagerContext

sys.path.insert(0, str(Path(__file__).parent))
from managers_fakes import KINDS


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest) -> Any:
    """`make(**options)`: each manager in turn."""
    target, config = KINDS[request.param]
    return lambda **options: target(config(**options), ManagerContext())
