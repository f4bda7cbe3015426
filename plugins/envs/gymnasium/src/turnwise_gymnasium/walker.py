"""A player of `frozen_lake` without a model: it walks toward the goal and ignores the holes. A baseline for what words
alone give."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from turnwise.contracts.chat import Message
from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.player import Player, chosen
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError

# What frozen_lake's observation `relative` says.
_SENTENCE = re.compile(r"The goal is ((?:\d+ (?:down|up))?\s?(?:\d+ (?:left|right))?)\.")


class FrozenLakeWalker(Player):
    """The inference backend `frozen_lake_walker`: reads "The goal is 2 down 1 right." in the last user message.

    It answers with one of the directions named there, drawn by the request's seed; where none is legal, with a legal
    action so drawn.
    """

    def __init__(self, config: None, context: InferenceContext) -> None:
        """Neither option nor context matters to it."""

    async def generate(self, request: Request) -> Generation:
        """The chosen direction, without ids, log-probs or versions. Raises EngineError if the sentence is not there."""
        text = _last_user_text(request.messages or ())
        found = _SENTENCE.findall(text)
        if not found:
            raise EngineError(
                f"the last user message says no 'The goal is … down … right.', frozen_lake_walker read {text!r:.120}."
                " Fix: env_config: {observation: relative} (or both) of frozen_lake, and a template that shows"
                " {observation}."
            )
        # The last sentence is the newest, where a template shows history.
        useful = re.findall("[a-z]+", found[-1])
        legal = (
            [action for action in request.actions if action.lower() in useful]
            if request.actions
            else [name.title() for name in useful]
        )
        choices = legal or list(request.actions)
        if not choices:
            raise EngineError(
                "no direction is left and the request names no legal action, frozen_lake_walker. Fix: info['actions']"
                " of the environment."
            )
        action = random.Random(request.seed).choice(choices)
        return chosen(action)


def _last_user_text(messages: Sequence[Message]) -> str:
    for message in reversed(messages):
        if message["role"] == "user":
            content = message["content"]
            return (
                content
                if isinstance(content, str)
                else "\n".join(part["text"] for part in content if part["type"] == "text")
            )
    return ""
