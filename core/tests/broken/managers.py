"""Environment managers that break their contract in one way each; test_testing_kit.py says which contract tests must
notice."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve

from turnwise import Implementation, hookimpl
from turnwise.contracts.env_manager import Episode, Sampler
from turnwise.data.trajectory import Trajectory, Turn, int32
from turnwise.errors import EnvironmentFailure
from turnwise.testing.fakes import (
    FakeEnvManager,
)


class EncodesAgain(FakeEnvManager):
    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        played = await super().run(episode, sampler)
        turns = [
            evolve(t, response_ids=int32(np.where(t.response_ids == ord("a"), ord("A"), t.response_ids)))
            for t in played.turns
        ]
        return evolve(played, turns=tuple(turns))


class Swallows(FakeEnvManager):
    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        try:
            return await super().run(episode, sampler)
        except EnvironmentFailure:
            return Trajectory(episode.tag, episode.group, episode.member, episode.seed, (), "terminated")


class PlaysOtherwise(FakeEnvManager):
    """Changes the turns, or the whole, of what was played."""

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        played = await super().run(episode, sampler)
        return evolve(played, turns=tuple(self.changed(list(played.turns))))

    def changed(self, turns: list[Turn]) -> list[Turn]:
        return turns


class AsksTwice(PlaysOtherwise):
    """A second call about every state, which it does not declare."""

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        played = await super().run(episode, sampler)
        if episode.chat is None:
            return played
        again = []
        for turn in played.turns:
            number = len(played.turns) + len(again)
            answer = await sampler.generate(
                turn=number, ids=turn.prompt_ids, images=played.images, max_new_tokens=1, actions=("a", "b")
            )
            assert answer.ids is not None
            columns = {"response_ids": answer.ids, "logprobs": answer.logprobs, "versions": answer.versions}
            again.append(evolve(turn, response_mask=np.ones(len(answer.ids), np.bool_), reward=0.0, **columns))
        return evolve(played, turns=(*played.turns, *again))


class MisplacesLogProbs(FakeEnvManager):
    def samples(self, trajectory: Trajectory) -> list[Any]:
        return [evolve(row, logprobs=np.roll(row.logprobs, -1)) for row in super().samples(trajectory)]


class MixesVersions(FakeEnvManager):
    def samples(self, trajectory: Trajectory) -> list[Any]:
        rows = super().samples(trajectory)
        return [evolve(row, versions=np.where(row.response_mask, row.versions.max(), -1)) for row in rows]


class ZeroesRewards(PlaysOtherwise):
    def changed(self, turns: list[Turn]) -> list[Turn]:
        return [evolve(turn, reward=0.0) for turn in turns]


class PaysATurnLate(PlaysOtherwise):
    def changed(self, turns: list[Turn]) -> list[Turn]:
        rewards = [0.0, *(turn.reward for turn in turns)]
        return [evolve(turn, reward=reward) for turn, reward in zip(turns, rewards)]


class AnchorsAfterTheStep(PlaysOtherwise):
    def changed(self, turns: list[Turn]) -> list[Turn]:
        following = [*(turn.anchor for turn in turns[1:]), "the end"]
        return [evolve(turn, anchor=anchor) for turn, anchor in zip(turns, following)]


class TellsTheNextObservation(PlaysOtherwise):
    def changed(self, turns: list[Turn]) -> list[Turn]:
        following = [*(turn.observation for turn in turns[1:]), "the end"]
        return [evolve(turn, observation=observation) for turn, observation in zip(turns, following)]


class CallsTruncatedTerminated(FakeEnvManager):
    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        played = await super().run(episode, sampler)
        return evolve(played, stop_reason="terminated") if played.stop_reason == "truncated" else played


class AlwaysSucceeds(FakeEnvManager):
    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        return evolve(await super().run(episode, sampler), success=True)


class MarksPrompts(FakeEnvManager):
    def samples(self, trajectory: Trajectory) -> list[Any]:
        return [evolve(row, response_mask=np.ones(len(row.input_ids), np.bool_)) for row in super().samples(trajectory)]


class RepeatsRows(FakeEnvManager):
    def samples(self, trajectory: Trajectory) -> list[Any]:
        return super().samples(trajectory) * 2


@hookimpl
def env_managers() -> list[Implementation]:
    made = [
        EncodesAgain,
        Swallows,
        MarksPrompts,
        RepeatsRows,
        AsksTwice,
        MisplacesLogProbs,
        MixesVersions,
        ZeroesRewards,
    ]
    made += [PaysATurnLate, AnchorsAfterTheStep, TellsTheNextObservation, CallsTruncatedTerminated, AlwaysSucceeds]
    return [Implementation(c.__name__, c) for c in made]
