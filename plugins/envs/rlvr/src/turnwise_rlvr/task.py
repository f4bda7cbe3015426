"""One question with what is known of its answer."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Task:
    """One question. `question`: a text, or chat messages. `answers`: accepted texts, the first is the known answer (empty:
    a row without one). `choices`: texts to choose from. `where`: the row, for messages."""

    question: str | tuple[Mapping[str, str], ...]
    answers: tuple[str, ...]
    tag: str
    choices: tuple[str, ...]
    where: str

    @property
    def text(self) -> str:
        """The question in words; of messages, those of the user."""
        if isinstance(self.question, str):
            return self.question
        return "\n".join(message["content"] for message in self.question if message["role"] == "user")
