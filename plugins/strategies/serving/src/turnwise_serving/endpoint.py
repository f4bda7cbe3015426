"""A server that was started by somebody else: its address, and its key, which stands in an environment variable and in
no file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from turnwise.errors import Problem


def endpoint_problems(where: str, url: str, key_variable: str | None) -> Iterator[Problem]:
    """What is wrong with the options `base_url` and `api_key_env` below the path `where`."""
    if urlsplit(url).scheme not in ("http", "https"):
        yield Problem(f"{where}.base_url", f"{url!r} is no address. Fix: such as http://127.0.0.1:8000")
    if key_variable and key_variable not in os.environ:
        lack = f"the environment variable {key_variable} with the server's key is not set"
        yield Problem(
            f"{where}.api_key_env",
            f"{lack}. Fix: set it, or api_key_env: another name, or null for a server without keys",
            machine=True,
        )


def key_from(variable: str | None) -> str | None:
    """The key that the environment variable holds; None without one."""
    return os.environ.get(variable) if variable else None
