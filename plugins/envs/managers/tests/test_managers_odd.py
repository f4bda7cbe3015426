"""One odd observation or response ends its episode and not the run; what the configuration itself gets wrong still ends
the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from managers_fakes import ROOMY, ScriptedEnv, ScriptedSampler, WatchedChat, going, image_part, run

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import ManagerContext
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise.testing.fake_model import IMAGE
from turnwise_managers.config import TrajectoryConfig
from turnwise_managers.trajectory import TrajectoryManager


class Strict(WatchedChat):
    """A text model's template that knows users and assistants alone."""

    def ids_of(self, messages: Sequence[Message]) -> list[int]:
        for message in messages:
            if message["role"] not in ("user", "assistant"):
                raise ConfigError(f"the template refuses the role {message['role']}. Fix: other messages")
            if not isinstance(message["content"], str):
                raise ConfigError("taken as a text model, but a message holds an image. Fix: text")
        return super().ids_of(messages)


ODD: dict[str, Any] = {"role": [{"role": "critic", "content": "hm"}], "image": [image_part(1)]}


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("odd", sorted(ODD))
def test_an_observation_that_the_chat_cannot_show_fails_its_episode(make: Any, odd: str, when: str) -> None:
    env = ScriptedEnv(ODD[odd], going("s1")) if when == "first" else ScriptedEnv("s0", going(ODD[odd], "s2"))
    with pytest.raises(
        EnvironmentFailure,
        match=r"Tag showed what the model's chat cannot: (the template refuses|taken as a text model)",
    ):
        run(make(), env, ScriptedSampler(["a", "b"]), evolve(ROOMY, max_turns=2), Strict())


def test_a_system_template_that_the_chat_refuses_is_the_configurations_fault(make: Any) -> None:
    with pytest.raises(ConfigError, match="refuses the role system"):
        run(
            make(agent_system_template="You play."),
            ScriptedEnv("s0", going("s1")),
            ScriptedSampler(["a"]),
            ROOMY,
            Strict(),
        )


def sampling_an_image(generation: Generation) -> Generation:
    assert generation.ids is not None
    return evolve(generation, ids=int32([IMAGE, *generation.ids[1:]]))


def test_sampled_image_tokens_fail_the_episode_where_an_image_follows_them() -> None:
    manager = TrajectoryManager(TrajectoryConfig(), ManagerContext())
    env = ScriptedEnv("s0", going([image_part(1)], "s2"))
    with pytest.raises(EnvironmentFailure, match="the model wrote the tokens of an image in turn 0"):
        run(manager, env, ScriptedSampler(["ab", "cd"], change=sampling_an_image), evolve(ROOMY, max_turns=2))


def test_sampled_image_tokens_are_text_where_no_image_follows(make: Any) -> None:
    env = ScriptedEnv([image_part(1)], going("s1", "s2"))
    played = run(make(), env, ScriptedSampler(["ab", "cd"], change=sampling_an_image), evolve(ROOMY, max_turns=2))
    assert [len(turn.images) for turn in played.turns] == [1, 1]
    assert all(np.array_equal(turn.response_ids[:1], [IMAGE]) for turn in played.turns)
