"""A configuration as it may be shown to a service: without keys and passwords."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from turnwise.config.problems import masked
from turnwise.config.source.yaml_file import parse_value

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
    values = _of_the_environment()

    def shown(value: Any, secret: bool = False) -> Any:
        if isinstance(value, dict):
            return {name: shown(item, secret or bool(SECRET.search(str(name)))) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [shown(item, secret) for item in value]
        if not isinstance(value, str) or not value or (value.startswith("${") and value.endswith("}")):
            return value
        return MASK if secret else IN_ADDRESS.sub(rf"\1{MASK}@", masked(value, values))

    return shown(plain)


def _of_the_environment() -> dict[str, str]:
    # A key reaches the configuration by other ways than `${oc.env:…}`, too: a shell puts it into an override.
    return {value: MASK for name, value in os.environ.items() if SECRET.search(name) and len(value) >= SHORTEST}


def written_secrets(plain: Any) -> dict[str, str]:  # Any: YAML's data
    """The texts under keys that name a secret, long enough to be distinguished from a word, each with its mask."""
    return {text: MASK for text in _texts(plain, False) if len(text) >= SHORTEST}


def _texts(value: Any, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, secret or bool(SECRET.search(str(name))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, secret)
    elif secret and value is not None and not isinstance(value, bool):
        text = str(value)
        if text and not (text.startswith("${") and text.endswith("}")):
            yield text


def secrets_of(override: str) -> dict[str, str]:
    """`written_secrets` of a `key=value`; of a value that is no YAML the whole text, where its key names a secret."""
    key, equals, text = override.partition("=")
    secret = any(SECRET.search(part) for part in _parts(key))
    try:
        value = parse_value(text) if equals else None
    except yaml.YAMLError:
        value = [text, *re.findall(r"\w[\w.-]+", text)] if secret else None
    return {one: MASK for one in _texts(value, secret) if len(one) >= SHORTEST}


def shown_override(override: str) -> str:
    """A `key=value` for a message or a log: the value is masked as a whole where any of it is under a name of a
    secret."""
    key, equals, text = override.partition("=")
    secret = any(SECRET.search(part) for part in _parts(key))
    try:
        hidden = any(_texts(parse_value(text) if equals else None, secret))
    except yaml.YAMLError:
        hidden = secret
    if hidden:
        return f"{key}={MASK}"
    return IN_ADDRESS.sub(rf"\1{MASK}@", masked(override, _of_the_environment()))


def _parts(key: str) -> list[str]:
    return re.split(r"[.\[\]]+", key.strip())
