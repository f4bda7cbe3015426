"""Sources of small plugins, for tests of the plugin manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

HEADER = "import turnwise\nfrom turnwise import Implementation\n"
GUESS = """
class Guess:
    def __init__(self, top=10, *, seed=0):
        self.top = top

@turnwise.hookimpl
def environments():
    return [Implementation("guess", Guess, summary="guess a number")]
"""
HOOK = "@turnwise.hookimpl\ndef environments():\n    return "
"""Before the list that a hook returns."""

Install = Callable[..., Path]
"""The fixture `install`."""
