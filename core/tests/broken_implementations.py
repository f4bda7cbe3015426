"""Implementations that break their contract in one way each; test_testing_kit.py says which contract tests must
notice."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from attrs import evolve

from turnwise import Implementation, hookimpl
from turnwise.contracts.batch_adjust import AdjustInput, PlannedUpdate
from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode, Sampler
from turnwise.contracts.inference import Request
from turnwise.contracts.logger import LoggerCapabilities, LoggerContext
from turnwise.contracts.loss import LossCapabilities, LossView
from turnwise.contracts.train import Offer
from turnwise.data.batch import Batch, Table
from turnwise.data.ops import trains
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.data.trajectory import Generation, Trajectory, Turn, int32
from turnwise.errors import EnvironmentFailure
from turnwise.testing import fixtures
from turnwise.testing.fakes import (
    FakeBackend,
    FakeBatchAdjust,
    FakeChat,
    FakeEnvironment,
    FakeEnvManager,
    FakeEstimator,
    FakeLogger,
    FakeLoss,
    FakeModelSource,
    FakeRole,
    FakeRuntime,
    FakeStrategy,
)

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class SeedsGlobally(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        random.seed(seed)
        return super().reset(seed=seed, options=options)


class DrawsGlobally(FakeEnvironment):
    def step(self, action: str) -> Step:
        observation, _, *rest = super().step(action)
        return observation, float(np.random.random()), *rest  # type: ignore[return-value]


class SharesState(FakeEnvironment):
    steps: ClassVar[list[int]] = [0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.steps[0] = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        self.steps[0] += 1
        observation, _, *rest = super().step(action)
        return observation, float(self.steps[0]), *rest  # type: ignore[return-value]


class IgnoresSeed(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        return super().reset(seed=0, options=options)


class SeedsOf31Bits(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        (seed or 0).to_bytes(4, signed=True)  # as a library in C does
        return super().reset(seed=seed, options=options)


class SeedsByHash(FakeEnvironment):
    """Another task in every process: `hash()` of a text is salted."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        return super().reset(seed=hash(str(seed)) % 2**32, options=options)


class OrdersBySet(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        _, info = super().reset(seed=seed, options=options)
        return f"{seed}: " + " ".join({"apple", "pear", "plum", "cherry", "quince", "fig"}), info


class RemembersEpisodes(FakeEnvironment):
    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.episodes += 1
        return f"episode {self.episodes} of seed {seed}", super().reset(seed=seed)[1]


class HoldsALambda(FakeEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.rule = lambda action: action


class RewardsNan(FakeEnvironment):
    def step(self, action: str) -> Step:
        observation, _, *rest = super().step(action)
        return observation, math.nan, *rest  # type: ignore[return-value]


class TellsLists(FakeEnvironment):
    def step(self, action: str) -> Step:
        *rest, info = super().step(action)
        return *rest, info | {"state_key": [1, 2]}  # type: ignore[return-value]


class ClosesOnce(FakeEnvironment):
    closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class RaisesOnEmpty(FakeEnvironment):
    def step(self, action: str) -> Step:
        if not action:
            raise ValueError("no action")
        return super().step(action)


class NeedsTheResponse(FakeEnvironment):
    def step(self, action: str, response: Any) -> Step:  # type: ignore[override]
        return super().step(response.text)


class RendersFloats(FakeEnvironment):
    def render(self) -> np.ndarray:
        return np.zeros((2, 2))


class LeaksOutsideTheMask(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        return advantages, returns + 1


class CountsRows(FakeEstimator):
    """The mean over rows: a trajectory counts as often as it was cut."""

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        scores = batch.trajectories["scores"]
        mean = scores[batch.samples["trajectory"]].mean() if len(batch.samples) else 0.0
        owner, mask = batch.tokens["trajectory"], batch.tokens["response_mask"]
        values = np.where(mask, scores[owner] - mean, 0.0)
        return values, values


class ReadsGroupNumbers(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        return advantages * (1 + batch.trajectories["group"][batch.tokens["trajectory"]]), returns


class ReadsWhatWasFiltered(FakeEstimator):
    """The baseline of a group counts members that a filter dropped."""

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        everything = batch.with_trajectories(trains=np.ones(len(batch.trajectories), np.bool_))
        advantages, returns = super().compute(everything)
        kept = trains(batch)[batch.tokens["trajectory"]]
        return advantages * kept, returns * kept


class TrainsWhatWasFiltered(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        dropped = batch.tokens["response_mask"] & ~trains(batch)[batch.tokens["trajectory"]]
        return advantages + dropped, returns


class MixesRoles(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return super().compute(batch.with_trajectories(traj_group_id=batch.trajectories["group"]))


class DividesByTheSpread(FakeEstimator):
    """Not finite where all scores of the batch are equal."""

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        with np.errstate(invalid="ignore", divide="ignore"):
            return advantages / np.float64(batch.trajectories["scores"].std()), returns


class WritesIntoTheBatch(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        batch.tokens["token_level_rewards"][:] = 0
        return super().compute(batch)


class SinglePrecision(FakeEstimator):
    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        advantages, returns = super().compute(batch)
        return advantages.astype(np.float32), returns


class InventsARow(FakeBatchAdjust):
    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        made = super().plan(rows)
        return [
            *made[:-1],
            PlannedUpdate(np.append(made[-1].rows, len(rows.trajectory)), np.append(made[-1].weights, 1.0)),
        ]


class Miscounts(FakeBatchAdjust):
    def updates(self, rows: int) -> int:
        return super().updates(rows) + 1


class ShufflesGlobally(FakeBatchAdjust):
    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        return super().plan(evolve(rows, seed=random.randrange(10**9)))


class KeepsNumbers:
    def __init__(self, config: None, context: Any) -> None:
        pass

    def keep(self, trajectories: Table) -> np.ndarray:
        return np.ones(len(trajectories))


class RefusesNan(FakeLogger):
    def __init__(self, config: None, context: LoggerContext) -> None:
        self._folder = context.folder

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        json.dumps({name: float(value) for name, value in metrics.items()}, allow_nan=False)

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        pass

    def artifact(self, step: int, name: str, path: Path) -> None:
        pass

    def resume(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class WritesWhereItStands(RefusesNan):
    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        Path("metrics.txt").write_text(str(metrics), encoding="utf-8")


class WritesBesideTheRun(RefusesNan):
    """To a path that it makes itself, in nobody's current folder."""

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        (self._folder.parent / "all_runs.txt").write_text(str(metrics), encoding="utf-8")


class AppendsLines(RefusesNan):
    """What the next ones are made of: every number and every text as a line of JSON that begins with the step."""

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        self.add("metrics.jsonl", [step, {name: str(value) for name, value in metrics.items()}])

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        self.add("trajectories.jsonl", [step, [turn.text for t in trajectories for turn in t.turns]])

    def add(self, name: str, line: list[Any]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def keep(self, name: str, before: int) -> None:
        path = self._folder / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line)[0] < before), encoding="utf-8")


class NeverResumes(AppendsLines):
    pass


class ResumesAStepLate(AppendsLines):
    def resume(self, step: int) -> None:
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            self.keep(name, step + 1)


class ResumesItsNumbersAlone(AppendsLines):
    def resume(self, step: int) -> None:
        self.keep("metrics.jsonl", step)


class ForgetsEverything(AppendsLines):
    def resume(self, step: int) -> None:
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            self.keep(name, 0)


class OnlyAddsAndForgets(ForgetsEverything):
    capabilities = LoggerCapabilities(only_adds=True)


class NeverResumesInSecret(AppendsLines):
    """In a format in which no mark can be read."""

    def add(self, name: str, line: list[Any]) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(bytes(255 - byte for byte in json.dumps(line).encode()))


class EmptiesTheFolder(RefusesNan):
    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def resume(self, step: int) -> None:
        for path in self._folder.glob("*.txt"):
            path.unlink()


class MeanLoss(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0].mean(), {}


class MetricWithGradient(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0], {"policy/log_prob": view.log_probs * 1}


class UsesTheEntropy(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0] - view.entropy, {}


class WeighsByPosition(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        loss = super().loss(view)[0]
        return loss * loss.new_ones(len(loss)).cumsum(0), {}


class Explodes(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * (5 * (view.log_probs - view.old_log_probs)).exp(), {}


class CentresOverTheView(FakeLoss):
    """Its gradient depends on how an update is cut into micro-batches."""

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(evolve(view, advantages=view.advantages - view.advantages.mean()))


class DropsTheFirstToken(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        loss = super().loss(view)[0]
        first = view.sample.diff(prepend=view.sample[:1] - 1) != 0
        return loss.masked_fill(first, 0.0), {}


class FlipsTheSign(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -super().loss(view)[0], {}


class DeniesItsRatio(FakeLoss):
    capabilities = LossCapabilities(uses_ratio=False)

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * view.log_ratio.exp(), {}


class ClaimsARatio(FakeLoss):
    """Its value knows the old policy, its gradient does not."""

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * view.log_ratio, {}


class TakesItsOwnRatio(FakeLoss):
    """`ratio_type` has no effect on it, and it does not say so."""

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * (view.log_probs - view.old_log_probs).clamp(-20, 20).exp(), {}


class NeedsTheReference(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0] + 0.01 * (view.log_probs - view.ref_log_probs), {}


class IgnoresTheTemperature(FakeBackend):
    async def generate(self, request: Request) -> Generation:
        return await super().generate(evolve(request, args=evolve(request.args, temperature=1.0)))


class KeepsItsVersion(FakeBackend):
    async def receive(self, offer: Offer) -> int:
        await super().receive(offer)
        self._version = 0
        return offer.version


class CountsRequests(FakeBackend):
    async def generate(self, request: Request) -> Generation:
        return await super().generate(evolve(request, seed=request.seed + self.served))


class NeverPauses(FakeBackend):
    async def pause(self) -> None:
        pass


class ColdStrategy(FakeStrategy):
    def _scores(self, before: np.ndarray) -> np.ndarray:
        return super()._scores(before) * self._context.temperature


class AveragesMicroBatches(FakeStrategy):
    def update(self, update: Update) -> UpdateResult:
        return super().update(evolve(update, rows=_scaled(update.rows, self._context.per_device_train_batch_size)))


def _scaled(rows: Rows, by: int) -> Rows:
    return evolve(rows, columns={**rows.columns, "coef": rows.columns["coef"] * by})


class GoesUphill(FakeStrategy):
    def update(self, update: Update) -> UpdateResult:
        return super().update(evolve(update, lr=-update.lr))


class ForgetsTheWeights(FakeStrategy):
    def load(self, folder: Path) -> None:
        kept = self._weights.copy()
        super().load(folder)
        self._weights[:] = kept


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


class SilentRole(FakeRole):
    async def run(self, method: str, work: Any) -> Any:
        try:
            return await super().run(method, work)
        except Exception:
            return None


class SilentRuntime(FakeRuntime):
    async def train(self, plan: Any) -> Any:
        placed = await super().train(plan)
        return SilentRole(placed.strategy)


class UnwatchedRole(FakeRole):
    async def watch(self) -> None:
        return None


class UnwatchedRuntime(FakeRuntime):
    async def train(self, plan: Any) -> Any:
        placed = await super().train(plan)
        return UnwatchedRole(placed.strategy)


class PartialRole:
    def __init__(self, role: Any) -> None:
        self.logprobs, self.update = role.logprobs, role.update
        self.close, self.load, self.save, self.offer, self.send, self.watch = (
            role.close,
            role.load,
            role.save,
            role.offer,
            role.send,
            role.watch,
        )


class PartialRuntime(FakeRuntime):
    async def train(self, plan: Any) -> Any:
        return PartialRole(await super().train(plan))


class AbsentWorkers(FakeRuntime):
    def executor(self, plans: Any, settings: Any, chat: Any, backend: Any) -> Any:
        return SimpleNamespace(workers=0)


class OpenChat(FakeChat):
    def extend(
        self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        return self.render(messages, images)


class OpenSource(FakeModelSource):
    def chat(self, folder: Path) -> FakeChat:
        return OpenChat()


@hookimpl
def environments() -> list[Implementation]:
    made = [SeedsGlobally, DrawsGlobally, SharesState, IgnoresSeed, SeedsOf31Bits, RemembersEpisodes, HoldsALambda]
    made += [RewardsNan, TellsLists, ClosesOnce, RaisesOnEmpty, NeedsTheResponse, RendersFloats]
    made += [SeedsByHash, OrdersBySet]
    return [Implementation(c.__name__, c) for c in made]


@hookimpl
def advantage_estimators() -> list[Implementation]:
    made = [LeaksOutsideTheMask, CountsRows, ReadsGroupNumbers, DividesByTheSpread, WritesIntoTheBatch, SinglePrecision]
    made += [ReadsWhatWasFiltered, TrainsWhatWasFiltered, MixesRoles]
    return [Implementation(c.__name__, c) for c in made]


@hookimpl
def batch_adjusts() -> list[Implementation]:
    return [Implementation(c.__name__, c) for c in (InventsARow, Miscounts, ShufflesGlobally)]


@hookimpl
def group_filters() -> list[Implementation]:
    return [Implementation("KeepsNumbers", KeepsNumbers)]


@hookimpl
def loggers() -> list[Implementation]:
    made = [RefusesNan, WritesWhereItStands, EmptiesTheFolder, WritesBesideTheRun, NeverResumes, ResumesAStepLate]
    made += [ResumesItsNumbersAlone, ForgetsEverything, NeverResumesInSecret, OnlyAddsAndForgets]
    return [Implementation(c.__name__, c) for c in made]


@hookimpl
def policy_losses() -> list[Implementation]:
    return [
        Implementation(c.__name__, c)
        for c in (
            *(MeanLoss, MetricWithGradient, UsesTheEntropy, WeighsByPosition, Explodes, CentresOverTheView),
            *(DropsTheFirstToken, FlipsTheSign, DeniesItsRatio, ClaimsARatio, TakesItsOwnRatio, NeedsTheReference),
        )
    ]


@hookimpl
def inference_backends() -> list[Implementation]:
    made = (IgnoresTheTemperature, KeepsItsVersion, CountsRequests, NeverPauses)
    return [
        Implementation(c.__name__, c, config="turnwise.testing.fakes:FakeBackendConfig", fixtures=fixtures.backend)
        for c in made
    ]


@hookimpl
def train_strategies() -> list[Implementation]:
    made = (ColdStrategy, AveragesMicroBatches, GoesUphill, ForgetsTheWeights)
    return [Implementation(c.__name__, c, fixtures=fixtures.strategy) for c in made]


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


@hookimpl
def runtimes() -> list[Implementation]:
    return [Implementation(c.__name__, c) for c in (SilentRuntime, UnwatchedRuntime, PartialRuntime, AbsentWorkers)]


@hookimpl
def model_sources() -> list[Implementation]:
    return [Implementation("OpenSource", OpenSource, fixtures=fixtures.source)]
