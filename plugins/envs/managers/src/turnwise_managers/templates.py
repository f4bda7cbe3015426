"""Prompt templates: text with `{placeholders}`, in which every other brace stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

from attrs import frozen

from turnwise.errors import did_you_mean

Content = str | list[dict[str, Any]]
"""A message's content: text, or parts of type text and image."""

PLACEHOLDERS = (
    "turn_idx",
    "observation",
    "actions_left",
    "max_response_length",
    "env_instruction",
    "step_count",
    "current_step",
    "current_observation",
    "history_length",
    "history",
)

# `{{name}}` first: else its inner part would be read as a placeholder.
_BRACED = re.compile(r"\{\{(?P<plain>[A-Za-z_]\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


@frozen
class Template:
    """A template cut into pieces: literal text, each followed by the name of a placeholder (None: by nothing)."""

    pieces: tuple[tuple[str, str | None], ...]

    @property
    def names(self) -> frozenset[str]:
        """The placeholders in use."""
        return frozenset(name for _, name in self.pieces if name is not None)

    def render(self, values: Mapping[str, Any]) -> Content:
        """The template filled in. The value of a placeholder is content; anything else is shown by `str`."""
        chunks: list[Content] = []
        for literal, name in self.pieces:
            chunks.append(literal)
            if name is not None:
                value = values[name]
                chunks.append(value if isinstance(value, list) else str(value))
        return join_content(chunks)


def parse_template(key: str, text: str) -> Template:
    """Cut the template given under `key`.

    A text that str.format accepts with these placeholders alone is read as str.format reads it (`{{` is a brace). In
    any other text `{name}` is a placeholder, `{{name}}` is `{name}`, and every other brace is itself. Raises ValueError
    for an unknown placeholder.
    """
    return Template(tuple(_format_pieces(text) or _plain_pieces(key, text)))


def _format_pieces(text: str) -> list[tuple[str, str | None]] | None:
    try:
        fields = list(Formatter().parse(text))
    except ValueError:
        return None
    # Other names, `{x!r}` and `{x:3}`: the text is JSON or code with braces of its own.
    if any(
        name is not None and (name not in PLACEHOLDERS or spec or conversion) for _, name, spec, conversion in fields
    ):
        return None
    return [(literal, name) for literal, name, _, _ in fields]


def _plain_pieces(key: str, text: str) -> list[tuple[str, str | None]]:
    pieces: list[tuple[str, str | None]] = []
    at = 0
    for match in _BRACED.finditer(text):
        name, plain = match["name"], match["plain"]
        literal = text[at : match.start()]
        if plain is not None:
            pieces.append((f"{literal}{{{plain}}}", None))
        elif name in PLACEHOLDERS:
            pieces.append((literal, name))
        else:
            raise ValueError(
                f"unknown placeholder {{{name}}} in {key}.{did_you_mean(name, PLACEHOLDERS)} "
                f"Known: {', '.join(PLACEHOLDERS)}. Fix: use one of them, or write {{{{{name}}}}} for text in braces."
            )
        at = match.end()
    return [*pieces, (text[at:], None)]


def join_content(chunks: Iterable[Content]) -> Content:
    """The chunks as one content: a string if no image is among them, else parts with neighbouring text joined."""
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in [{"type": "text", "text": chunk}] if isinstance(chunk, str) else chunk:
            if part["type"] == "text" and parts and parts[-1]["type"] == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            elif part["type"] != "text" or part["text"]:
                parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def text_of(content: Any) -> str:
    """The text of a content or of an observation, without images; several messages are joined by newlines."""
    if isinstance(content, str):
        return content
    if not content:
        return ""
    if "role" in content[0]:
        return "\n".join(text_of(message["content"]) for message in content)
    return "".join(part["text"] for part in content if part.get("type") == "text")
