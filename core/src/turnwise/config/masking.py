"""A configuration as it may be shown to a service: without keys and passwords."""

from __future__ import annotations

import os
import re
from typing import Any

from turnwise.config.problems import masked

MASK = "***"
SECRET = re.compile(
    r"(api_?key|access_?key|secret(_?key)?|passwd|password|credentials?|(access|api|auth|bearer|hf|session)_?token)$",
    re.IGNORECASE,
)
"""Names of keys and of environment variables whose value is nobody's business; `max_new_tokens` is not one of them."""
SHORTEST = 8
"""Characters of a value that is looked for in every text: a shorter one may be a word."""


def without_secrets(plain: Any) -> Any:
    """A copy of plain data with `***` in place of texts under a key that names a secret, and of the values of
    environment variables so named, wherever they stand. References `${…}` stay: they hold no value."""
    values = {value: MASK for name, value in os.environ.items() if SECRET.search(name) and len(value) >= SHORTEST}

    def shown(value: Any, key: Any = "") -> Any:
        if isinstance(value, dict):
            return {name: shown(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [shown(item, key) for item in value]
        if not isinstance(value, str) or value.startswith("${"):
            return value
        return MASK if value and SECRET.search(str(key)) else masked(value, values)

    return shown(plain)
