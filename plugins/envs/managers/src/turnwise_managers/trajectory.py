"""The `trajectory` manager: one conversation that only grows, tokens in and tokens out, one training sample per episode."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from turnwise.contracts.chat import Chat, Message
from turnwise.contracts.env_manager import Episode, ManagerContext, Sampler
from turnwise.data.trajectory import Sample, Trajectory, int32
from turnwise.errors import ConfigError
from turnwise_managers.config import TrajectoryConfig
from turnwise_managers.drift import drift_of
from turnwise_managers.play import Play, Prompt, Rules, play
from turnwise_managers.samples import sample_of
from turnwise_managers.templates import text_of


class TrajectoryManager:
    """The prompt of a turn is the previous prompt, the tokens that were sampled, and the new observation as their continuation."""

    def __init__(self, config: TrajectoryConfig, context: ManagerContext) -> None:
        self.rules = Rules.of(config)
        self.single_turn = config.history == "single_turn"
        self.detect_drift = config.detect_drift

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        """Play the episode to its end. Raises EngineError, EnvironmentFailure, and ConfigError for what `history` cannot show."""
        if sampler.input == "messages":
            return await play(self.rules, episode, sampler, self._messages, 0)
        chat = episode.chat
        assert chat is not None, "a backend of input ids needs the chat"
        longest = episode.limits.sequence_length - 1
        prompt_of = self._compared if self.detect_drift else self._ids
        return await play(self.rules, episode, sampler, lambda state: prompt_of(state, chat), longest)

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """The whole episode as one row; none if nothing was sampled."""
        sample = sample_of(dict(enumerate(trajectory.turns)))
        return [] if sample is None else [sample]

    def _ids(self, state: Play, chat: Chat) -> Prompt:
        if not state.turns:
            messages = state.conversation(())
            images = state.images_in(messages)
            return Prompt(int32(chat.render(messages, state.arrays(images), state.tools)), None, images)
        last, shown = state.turns[-1], state.shown[-1]
        so_far = np.concatenate([last.prompt_ids, last.response_ids])
        images = state.images_in(shown)
        if self.single_turn:
            added = chat.continue_text(so_far, self._continuation(state, shown))
        else:
            added = chat.extend(so_far, last.finish, shown, state.arrays(images))
        return Prompt(int32(np.concatenate([so_far, added])), None, last.images + images)

    def _compared(self, state: Play, chat: Chat) -> Prompt:
        """The prompt, compared with a rendering of the same conversation from its messages."""
        prompt, told = self._ids(state, chat), self._messages(state)
        assert prompt.ids is not None and told.messages is not None
        inside = told.messages.pop()["content"] if self.single_turn and state.turns else ""
        rendered = chat.render(told.messages, state.arrays(told.images), state.tools)
        if inside:
            rendered = np.concatenate([rendered, chat.continue_text(rendered, inside)])
        return evolve(prompt, compared=True, drift=drift_of(chat, prompt.ids, rendered))

    def _messages(self, state: Play) -> Prompt:
        if not self.single_turn or not state.turns:
            messages = state.conversation(state.earlier())
            return Prompt(None, messages, state.images_in(messages))
        first = [*state.head(), *state.shown[0]]
        told = [turn.text + self._continuation(state, shown) for turn, shown in zip(state.turns, state.shown[1:], strict=True)]
        return Prompt(None, [*first, {"role": "assistant", "content": "".join(told)}], state.images_in(first))

    def _continuation(self, state: Play, shown: list[Message]) -> str:
        if state.images_in(shown):
            raise ConfigError(
                f"history: single_turn cannot show an image after the first turn, in environment {state.episode.tag}. Fix: history: messages."
            )
        return text_of(shown)
