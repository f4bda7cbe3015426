"""The fakes: they fail as asked, count right, and together they learn."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.batch_adjust import AdjustContext, AdjustInput
from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.env_manager import Episode, Limits, ManagerContext
from turnwise.contracts.environment import check_observation, check_step
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.group_filter import FilterContext
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.logger import LoggerContext
from turnwise.contracts.train import Offer, TrainContext
from turnwise.data import Rows, Update, build_batch
from turnwise.data.rows import rows_of
from turnwise.errors import CheckpointError, ConfigError, EnvironmentFailure, TrainerError
from turnwise.testing.fake_model import END, IMAGE, ROLES, VOCABULARY, initial_weights, save_model
from turnwise.testing.fakes import (
    FakeBackend,
    FakeBackendConfig,
    FakeBatchAdjust,
    FakeChat,
    FakeEnvironment,
    FakeEnvManager,
    FakeEstimator,
    FakeFilterConfig,
    FakeGroupFilter,
    FakeLogger,
    FakeLoggerConfig,
    FakeModelSource,
    FakeStrategy,
)
from turnwise.testing.synthetic import batch_of, one_row, row_per_turn, trajectories

USER, ASSISTANT = ROLES["user"], ROLES["assistant"]


def test_environment_rewards_the_share_of_the_target_letter() -> None:
    environment = FakeEnvironment(length=2, target="a", reward=2.0)
    first, info = environment.reset(seed=1)
    assert info["state_key"][1] == 0
    observation, reward, done, _, info = environment.step("abca")
    assert (reward, done) == (1.0, False)
    assert (int(observation.split()[1]), int(first.split()[1])) == (info["state_key"][0] + 1, info["state_key"][0])
    _, reward, done, _, info = environment.step("aa")
    assert (reward, done, info["success"]) == (2.0, True, True)


def test_environment_fails_as_asked_at_its_turn_and_for_its_seeds_alone() -> None:
    def played(seed: int, **options: Any) -> Any:
        environment = FakeEnvironment(fails_at=2, fails_every=2, **options)
        environment.reset(seed=seed)
        check_step(environment.step("a"), "fake")
        return check_step(environment.step("a"), "fake")

    with pytest.raises(RuntimeError, match="turn 2"):
        played(4, fails="raise")
    for failure in ("nan", "nontext"):
        with pytest.raises(EnvironmentFailure):
            played(4, fails=failure)
    assert played(4, fails="hang", hang=0.0)[1] == 1.0
    for failure in ("raise", "nan", "nontext"):
        assert played(3, fails=failure)[1] == 1.0


@pytest.mark.parametrize("reward", [math.inf, -math.inf, math.nan, 1e200, -3.5e38, "much"])
def test_a_reward_that_training_cannot_compute_with_fails_the_step(reward: Any) -> None:
    assert check_step(("seen", 3.4e38, True, False, {}), "it")[1] == 3.4e38
    with pytest.raises(EnvironmentFailure, match=r"it\.step returned the reward .*Fix: return a finite number"):
        check_step(("seen", reward, True, False, {}), "it")


def test_environment_fails_at_reset_with_turn_zero() -> None:
    with pytest.raises(RuntimeError, match="turn 0"):
        FakeEnvironment(fails="raise", fails_at=0).reset(seed=0)
    with pytest.raises(EnvironmentFailure):
        check_observation(FakeEnvironment(fails="nan", fails_at=0).reset(seed=0)[0], "fake")


def test_environment_with_tasks_is_a_data_set() -> None:
    assert not hasattr(FakeEnvironment(), "num_tasks")
    environment = FakeEnvironment(tasks=4)
    starts = {environment.reset(seed=0, options={"index": i})[0] for i in range(environment.num_tasks)}
    assert len(starts) == 4


def test_chat_renders_extends_and_decodes_bytes() -> None:
    chat = FakeChat()
    prompt = chat.render([{"role": "user", "content": "hi"}])
    assert prompt.tolist() == [USER, *b"hi", END, ASSISTANT]
    image = {"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}
    assert chat.render([{"role": "user", "content": [image]}]).tolist() == [USER, *[IMAGE] * 4, END, ASSISTANT]
    sampled = np.append(prompt, [ord("a"), END]).astype(np.int32)
    assert chat.extend(sampled, "stop", [{"role": "user", "content": "x"}]).tolist() == [USER, ord("x"), END, ASSISTANT]
    assert chat.extend(sampled[:-1], "length", []).tolist() == [END, ASSISTANT]
    assert chat.decode(np.array([ord("a"), END, IMAGE])) == "a"
    assert chat.decode(chat.continue_text(prompt, "é")) == "é"


def test_source_prepares_a_recipe_a_folder_or_refuses(tmp_path: Path) -> None:
    source = FakeModelSource(None, ModelSourceContext(tmp_path))
    folder = source.prepare({"letters": "xy"})
    assert source.prepare(str(folder)) == folder
    for wrong in ({"leters": "xy"}, "no such folder"):
        with pytest.raises(ConfigError, match=r"Did you mean 'letters'|weights\.npy"):
            source.prepare(wrong)


def test_backend_is_greedy_at_temperature_zero_and_stops_at_the_end_id() -> None:
    weights = np.zeros((VOCABULARY, VOCABULARY))
    weights[ASSISTANT, ord("c")] = weights[ord("c"), END] = 3.0

    async def ask() -> Any:
        backend = FakeBackend(FakeBackendConfig(), InferenceContext(None, FakeChat()))
        await backend.receive(Offer("shared", 1, {"weights": weights}))
        return await backend.generate(
            Request(0, GeneratingArgs(temperature=0.0), 9, ids=np.array([ASSISTANT], np.int32))
        )

    answer = asyncio.run(ask())
    assert (answer.text, answer.finish, answer.ids.tolist()) == ("c", "stop", [ord("c"), END])
    expected = 3 - math.log(math.exp(3) + VOCABULARY - 1)
    np.testing.assert_allclose(answer.logprobs, [expected] * 2, atol=1e-6)


def strategy(folder: Path, **options: Any) -> FakeStrategy:
    save_model(folder, initial_weights())
    options = {"temperature": 0.7, "max_grad_norm": 1e9, **options}
    return FakeStrategy(None, TrainContext(folder, "actor_train", **options))


def weights_of(made: FakeStrategy) -> np.ndarray:
    """The weights themselves: what changes in one changes in the other."""
    return made.offer("shared", 0).payload["weights"]


def small_rows(columns: dict[str, Any]) -> Rows:
    """One row `user a b assistant`-like: five ids, three sampled tokens, one pair twice."""
    ids = np.array([USER, 97, 98, 97, 98], np.int32)
    return Rows(
        ids,
        np.array([0, 5]),
        np.array([False, False, True, True, True]),
        {k: np.asarray(v, np.float64) for k, v in columns.items()},
    )


COLUMNS = {
    "coef": [0.5, 0.2, 0.3],
    "advantages": [1.0, -2.0, 0.5],
    "ref_log_probs": [-1.0, -2.0, -1.5],
    "returns": [1.0, 0.0, 2.0],
}


def objective(made: FakeStrategy, rows: Rows, kl_coef: float, entropy_coef: float) -> float:
    """Σ coef·(−A·lp + β·k3 − c·H), token by token in plain loops."""
    total, columns = 0.0, rows.columns
    for k, at in enumerate((2, 3, 4)):
        logits = weights_of(made)[rows.input_ids[at - 1]] / 0.7
        p = np.exp(logits) / np.exp(logits).sum()
        lp = math.log(p[rows.input_ids[at]])
        d = columns["ref_log_probs"][k] - lp
        entropy = -sum(x * math.log(x) for x in p)
        total += columns["coef"][k] * (
            -columns["advantages"][k] * lp + kl_coef * (math.exp(d) - d - 1) - entropy_coef * entropy
        )
    return total


def test_strategy_follows_the_gradient_of_the_objective(tmp_path: Path) -> None:
    rows, kl_coef, entropy_coef = small_rows(COLUMNS), 0.3, 0.2
    made = strategy(tmp_path)
    before = weights_of(made).copy()
    result = made.update(Update(rows, 1.0, entropy_coef=entropy_coef, kl_coef=kl_coef))
    step = before - weights_of(made)
    weights_of(made)[:] = before
    assert result.loss == pytest.approx(objective(made, rows, kl_coef, entropy_coef), abs=1e-9)
    for place in [(97, 98), (97, 99), (98, 97), (98, END), (98, 5)]:
        values = []
        for shift in (1e-4, -1e-4):
            weights_of(made)[:] = before
            weights_of(made)[place] += shift
            values.append(objective(made, rows, kl_coef, entropy_coef))
        assert step[place] == pytest.approx((values[0] - values[1]) / 2e-4, abs=1e-7)
    assert not step[USER].any()


def test_strategy_with_a_value_head_moves_towards_the_returns(tmp_path: Path) -> None:
    critic = strategy(tmp_path, head="value")
    rows = small_rows(COLUMNS)
    result = critic.update(Update(rows, 1.0))
    assert result.loss == pytest.approx((0.5 * 1 + 0.3 * 4) / 2)
    np.testing.assert_allclose(critic.values(rows), [0.5 * 1 + 0.3 * 2, 0.0, 0.5 * 1 + 0.3 * 2], atol=1e-6)


def test_strategy_clips_refuses_and_reports(tmp_path: Path) -> None:
    made = strategy(tmp_path, max_grad_norm=0.01)
    before = weights_of(made).copy()
    result = made.update(Update(small_rows(COLUMNS), 1.0))
    assert np.linalg.norm(before - weights_of(made)) == pytest.approx(0.01)
    assert result.grad_norm > 0.01
    moved = weights_of(made).copy()
    assert made.update(Update(small_rows(COLUMNS | {"advantages": [math.nan, 0, 0]}), 1.0)).skipped
    np.testing.assert_array_equal(weights_of(made), moved)
    with pytest.raises(TrainerError, match="frozen"):
        strategy(tmp_path, trainable=False).update(Update(small_rows(COLUMNS), 1.0))
    with pytest.raises(CheckpointError, match="not a model folder"):
        FakeStrategy(None, TrainContext(tmp_path / "nothing", "reference"))
    (tmp_path / "state.npz").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        made.load(tmp_path)


def test_shared_offers_follow_the_trainer_and_copies_do_not(tmp_path: Path) -> None:
    made = strategy(tmp_path)
    shared, copy = made.offer("shared", 1), made.offer("fake", 1)
    made.update(Update(small_rows(COLUMNS), 1.0))
    assert np.array_equal(shared.payload["weights"], weights_of(made))
    assert not np.array_equal(copy.payload["weights"], weights_of(made))


def test_estimator_centres_scores_in_their_group() -> None:
    batch = batch_of(trajectories())
    advantages, returns = FakeEstimator(None, EstimatorContext()).compute(batch)
    for row, group in enumerate(batch.trajectories["group"]):
        score, mean = (
            batch.trajectories["scores"][row],
            batch.trajectories["scores"][batch.trajectories["group"] == group].mean(),
        )
        mine = (batch.tokens["trajectory"] == row) & batch.tokens["response_mask"]
        np.testing.assert_allclose(advantages[mine], score - mean, atol=1e-12)
        np.testing.assert_array_equal(returns[mine], score)


def test_adjust_deals_every_row_once() -> None:
    plan = FakeBatchAdjust(None, AdjustContext(unit=4, rollout_batch_size=8)).plan(
        AdjustInput(np.zeros(7, np.int64), 8, seed=1)
    )
    assert [len(update.rows) for update in plan] == [4, 3]
    assert sorted(np.concatenate([update.rows for update in plan])) == list(range(7))


def test_filter_drops_even_groups_when_asked() -> None:
    table = batch_of(trajectories(groups=2, members=1)).trajectories
    assert FakeGroupFilter(FakeFilterConfig(), FilterContext()).keep(table).tolist() == [True, True]
    assert FakeGroupFilter(FakeFilterConfig(drop_even=True), FilterContext()).keep(table).tolist() == [False, True]


def test_logger_remembers_forgets_on_resume_and_fails_when_asked(tmp_path: Path) -> None:
    logger = FakeLogger(FakeLoggerConfig(fails_at=5), LoggerContext(tmp_path))
    assert FakeLogger.latest is logger
    for step in range(3):
        logger.scalars(step, {"a": step})
        logger.scalars(step, {"b": step})
        logger.trajectories(step, "train", trajectories(1, 1))
        logger.artifact(step, "x", tmp_path)
    logger.resume(1)
    assert logger.metrics == {0: {"a": 0, "b": 0}}
    assert list(logger.played) == [(0, "train")]
    assert logger.artifacts == [(0, "x", tmp_path)]
    with pytest.raises(RuntimeError, match="step 5"):
        logger.scalars(5, {})


def test_the_two_cuts_of_a_trajectory_hold_the_same_sampled_tokens() -> None:
    made = trajectories()
    whole, cut = batch_of(made, one_row), batch_of(made, row_per_turn)
    assert len(cut.samples) > len(whole.samples)
    for name in ("input_ids", "turn", "trajectory", "infer_log_probs", "token_level_rewards"):
        np.testing.assert_array_equal(whole.tokens[name][whole.sampled], cut.tokens[name][cut.sampled])


async def _roll_out(backend: FakeBackend, step: int) -> list[Any]:
    """Four groups of four episodes with manager, environment and backend."""

    class Sampler:
        input = "ids"

        def __init__(self, seed: int) -> None:
            self.seed = seed

        async def generate(self, *, turn: int, ids: Any = None, max_new_tokens: int, **_: Any) -> Any:
            return await backend.generate(Request(self.seed + turn, GeneratingArgs(), max_new_tokens, ids=ids))

    class Plain:
        def __init__(self) -> None:
            self.environment = FakeEnvironment(length=2)

        async def reset(self) -> Any:
            return self.environment.reset(seed=1)

        async def step(self, action: str, response: Any = None) -> Any:
            return self.environment.step(action)

    manager = FakeEnvManager(None, ManagerContext("fake", 2))
    limits = Limits(sequence_length=256, max_new_tokens=4, max_tokens_per_step=4, max_turns=2)
    runs = []
    for group in range(4):
        for member in range(4):
            episode = Episode(Plain(), FakeChat(), limits, "fake", group, member, 0, 1)
            runs.append(manager.run(episode, Sampler(10_000 * step + 1_000 * group + 100 * member)))
    return await asyncio.gather(*runs)


def test_the_fakes_together_learn_to_write_the_letter(tmp_path: Path) -> None:
    save_model(tmp_path, initial_weights())
    backend = FakeBackend(FakeBackendConfig(), InferenceContext(tmp_path, FakeChat()))
    actor = FakeStrategy(None, TrainContext(tmp_path, "actor_train"))
    estimator, manager = FakeEstimator(None, EstimatorContext()), FakeEnvManager(None, ManagerContext())
    scores = []
    for step in range(25):
        played = asyncio.run(_roll_out(backend, step))
        batch = build_batch(played, [manager.samples(trajectory) for trajectory in played])
        advantages, _ = estimator.compute(batch)
        rows = rows_of(
            batch.with_tokens(advantages=advantages, coef=batch.tokens["response_mask"] / len(batch.sampled))
        )
        np.testing.assert_array_equal(
            actor.logprobs(rows), batch.tokens["infer_log_probs"][batch.tokens["response_mask"]]
        )
        actor.update(Update(rows, lr=4.0))
        assert asyncio.run(backend.receive(actor.offer("fake", step + 1))) == step + 1
        scores.append(float(batch.trajectories["scores"].mean()))
    assert scores[0] < 0.8
    assert np.mean(scores[-3:]) > 1.5
