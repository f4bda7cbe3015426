"""A configuration as it may be shown to a service: without keys and passwords."""

from __future__ import annotations

import os
import re
from typing import Any

from turnwise.config.problems import masked

MASK = "***"
SECRET = re.compile(
    r"(api_?key|access_?key|private_?key|secret(_?key)?|passwd|password|credential|authorization"
    r"|(access|api|auth|bearer|hf|session)_?token)s?$",
    re.IGNORECASE,
)
"""Names of keys and of environment variables whose value is nobody's business; `max_new_tokens` is not one of them."""
IN_ADDRESS = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
"""A password in an address: `https://user:password@host`."""
SHORTEST = 8
"""Characters of a value that is looked for in every text: a shorter one may be a word."""


def without_secrets(plain: Any) -> Any:  # Any: YAML's data
    """A copy of plain data with `***` in place of every text under a key that names a secret, of passwords in
    addresses, and of the values of environment variables that name a secret, wherever they stand. References `${…}`
    stay: they hold no value."""
    values = {value: MASK for name, value in os.environ.items() if SECRET.search(name) and len(value) >= SHORTEST}

    def shown(value: Any, secret: bool = False) -> Any:
        if isinstance(value, dict):
            return {name: shown(item, secret or bool(SECRET.search(str(name)))) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [shown(item, secret) for item in value]
        if not isinstance(value, str) or not value or (value.startswith("${") and value.endswith("}")):
            return value
        return MASK if secret else IN_ADDRESS.sub(rf"\1{MASK}@", masked(value, values))

    return shown(plain)
