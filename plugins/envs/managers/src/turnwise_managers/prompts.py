"""Two ways from a conversation to the prompt of its next call: one that only grows, and one rendered anew each time."""

from __future__ import annotations

from typing import Literal

import numpy as np
from attrs import evolve, frozen

from turnwise.contracts.chat import Message
from turnwise.data.trajectory import int32
from turnwise.errors import ConfigError
from turnwise_managers.drift import drift_of
from turnwise_managers.line import Line, Prompt
from turnwise_managers.templates import text_of


@frozen
class Growing:
    """The previous prompt, the very tokens that were sampled, and the new messages as the chat template continues:
    tokens in, tokens out.

    `history`: messages, or the whole dialogue inside one assistant message. `detect_drift`: compare each prompt with a
    rendering."""

    history: Literal["messages", "single_turn"] = "messages"
    detect_drift: bool = False

    def longest(self, line: Line) -> int:
        """A prompt leaves room for one token."""
        return line.world.episode.limits.sequence_length - 1

    def of(self, line: Line) -> Prompt:
        """The prompt of the coming call. Raises EnvironmentFailure, and ConfigError for what `history` cannot show."""
        if line.sampler.input == "messages":
            return self._messages(line)
        return self._compared(line) if self.detect_drift else self._ids(line)

    def _ids(self, line: Line) -> Prompt:
        if not line.turns:
            messages = line.conversation(())
            return Prompt(line.rendered(messages), None, line.world.images_in(messages))
        last, shown = line.turns[-1], line.shown[-1]
        so_far = np.concatenate([last.prompt_ids, last.response_ids])
        images = line.world.images_in(shown)
        if self.history == "single_turn":
            # As text inside the assistant's message: no header of another role may stand between.
            added = line.chat.continue_text(so_far, self._continuation(line, shown))
        else:
            # The sampled tokens themselves go on: encoding their text again could give others.
            added = line.extended(so_far, shown)
        # In the prompt's order: the n-th image belongs to the n-th place of an image in it.
        return Prompt(int32(np.concatenate([so_far, added])), None, last.images + images)

    def _compared(self, line: Line) -> Prompt:
        """The prompt, compared with a rendering of the same conversation from its messages."""
        prompt, spoken = self._ids(line), self._messages(line)
        assert prompt.ids is not None and spoken.messages is not None
        # The last message is unfinished: what the template writes around a whole one must not be compared.
        inside = spoken.messages.pop()["content"] if self.history == "single_turn" and line.turns else ""
        rendered = line.rendered(spoken.messages)
        if inside:
            rendered = np.concatenate([rendered, line.chat.continue_text(rendered, inside)])
        return evolve(prompt, compared=True, drift=drift_of(line.chat, prompt.ids, rendered))

    def _messages(self, line: Line) -> Prompt:
        if self.history == "messages" or not line.turns:
            messages = line.conversation(line.earlier())
            return Prompt(None, messages, line.world.images_in(messages))
        first = [*line.head(), *line.shown[0]]
        texts = [
            turn.text + self._continuation(line, shown) for turn, shown in zip(line.turns, line.shown[1:], strict=True)
        ]
        return Prompt(None, [*first, {"role": "assistant", "content": "".join(texts)}], line.world.images_in(first))

    def _continuation(self, line: Line, shown: list[Message]) -> str:
        if line.world.images_in(shown):
            tag = line.world.episode.tag
            raise ConfigError(
                f"history: single_turn cannot show an image after the first turn, in environment {tag}. Fix: history:"
                " messages."
            )
        return text_of(shown)


@frozen
class Anew:
    """Each prompt is rendered from the last `history_length` calls of the rules, tokenised, and then checked for its
    length."""

    def longest(self, line: Line) -> int:
        """A prompt leaves room for `max_new_tokens`."""
        return line.world.episode.limits.max_prompt_length

    def of(self, line: Line) -> Prompt:
        """The prompt of the coming call. Raises EnvironmentFailure."""
        messages = line.conversation(() if line.rules.history_in_text else line.earlier())
        images = line.world.images_in(messages)
        if line.sampler.input == "messages":
            return Prompt(None, messages, images)
        return Prompt(line.rendered(messages), None, images)
