"""The `stepwise` manager: each turn's prompt is rendered anew from the last turns, one training sample per turn or merged run of turns."""

from __future__ import annotations

from turnwise.contracts.env_manager import Episode, ManagerContext, Sampler
from turnwise.data.trajectory import Sample, Trajectory, int32
from turnwise_managers.config import StepwiseConfig
from turnwise_managers.play import Play, Prompt, Rules, play
from turnwise_managers.samples import merged, sample_of


class StepwiseManager:
    """Earlier turns stand before the observation as messages, or, where the template has `{history}`, inside the one user message."""

    row_per_turn = True

    def __init__(self, config: StepwiseConfig, context: ManagerContext) -> None:
        self.rules = Rules.of(config, config.history_length)
        self.merge_steps = config.merge_steps

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        """Play the episode to its end. A prompt over `max_prompt_length` is not sent: the trajectory ends with the turns it has.

        Raises EngineError and EnvironmentFailure."""
        takes_messages = sampler.input == "messages"
        chat = episode.chat
        assert takes_messages or chat is not None, "a backend of input ids needs the chat"

        def prompt_of(state: Play) -> Prompt:
            messages = state.conversation(() if self.rules.history_in_text else state.earlier())
            images = state.images_in(messages)
            if takes_messages:
                return Prompt(None, messages, images)
            assert chat is not None
            return Prompt(int32(chat.render(messages, state.arrays(images), state.tools)), None, images)

        return await play(self.rules, episode, sampler, prompt_of, episode.limits.max_prompt_length)

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """One row per turn in which a token was sampled; with `merge_steps`, turns whose prompts continue each other share one."""
        if self.merge_steps:
            return merged(trajectory.turns)
        rows = (sample_of({index: turn}) for index, turn in enumerate(trajectory.turns))
        return [row for row in rows if row is not None]
