"""Playing without training: which tasks, with whom, and the environments' own texts."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from turnwise.config.loader import load
from turnwise.config.schema import Choice, CustomEnv, EnvManagerConfig, RunConfig
from turnwise.contracts.inference import GeneratingArgs, InferenceContext
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.contracts.train import Lora
from turnwise.errors import CheckpointError, ConfigError
from turnwise.pipeline import checkpoint
from turnwise.pipeline import standalone as play
from turnwise.planning import assembly
from turnwise.testing.fake_model import initial_weights, save_model
from turnwise.testing.fakes import FakeBackend

Toy = Callable[..., Path]
TWO = {
    "A": {"env_type": "fake", "env_manager": "fake", "max_steps": 3},
    "B": {"env_type": "fake", "env_manager": "fake", "max_steps": 2},
}


@pytest.fixture
def config(toy: Toy) -> RunConfig:
    """Two tags: 4 training groups of 2, 5 evaluation tasks."""
    path = toy(
        custom_envs=TWO,
        rollout_batch_size=8,
        train_env_manager={"num_env_groups": 4, "group_size": 2, "tags": ["A", "B"]},
        val_env_manager={"num_env_groups": 5, "group_size": 1, "tags": ["A", "B"]},
    )
    return load(path).config


def tasks(config: RunConfig) -> tuple[int, int, tuple[str, ...], tuple[int, ...]]:
    manager = config.val_env_manager
    assert manager is not None
    return manager.num_env_groups, manager.group_size, manager.tags, manager.num_groups_partition


def run(config: RunConfig, **options: Any) -> Any:
    return asyncio.run(play.play(config, Path(), **{"player": None, "model": None, **options}))


def test_without_wishes_the_evaluation_is_played(config: RunConfig) -> None:
    got = play.with_tasks(config)
    assert tasks(got) == (5, 1, ("A", "B"), (3, 2))
    assert (got.val_seed, got.val_env_manager.generating_args.temperature) == (0, 0)  # type: ignore[union-attr]


def test_split_tag_episodes_and_seed_are_heard(config: RunConfig) -> None:
    got = play.with_tasks(config, split="train", seed=7)
    assert (*tasks(got), got.val_seed) == (4, 2, ("A", "B"), (2, 2), 7)
    assert got.val_env_manager.generating_args == config.actor_infer.generating_args  # type: ignore[union-attr]
    assert tasks(play.with_tasks(config, tag="B")) == (5, 1, ("B",), (5,))
    assert tasks(play.with_tasks(config, episodes=7)) == (7, 1, ("A", "B"), (4, 3))
    assert tasks(play.with_tasks(config, episodes=1, split="train")) == (1, 1, ("A",), (1,))
    assert tasks(play.with_tasks(config, tag="B", episodes=3)) == (3, 1, ("B",), (3,))


def test_wishes_that_cannot_be_met_are_one_line(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"^--tag 'C' is not in custom_envs\. It holds: A, B\. Fix: one of them$"):
        play.with_tasks(config, tag="C")
    with pytest.raises(
        ConfigError,
        match=r"^\$\.val_env_manager is missing: there is nothing to evaluate on\. Fix: add it \(`turnwise rollout",
    ):
        play.with_tasks(evolve(config, val_env_manager=None))
    assert tasks(play.with_tasks(evolve(config, val_env_manager=None), split="train"))[0] == 4


def test_debugging_is_one_episode_on_this_thread_without_any_limit(config: RunConfig) -> None:
    got = play.for_debugging(play.with_tasks(config))
    manager = got.val_env_manager
    assert manager is not None
    assert tasks(got) == (1, 1, ("A",), (1,))
    assert (manager.step_timeout, manager.reset_timeout, got.actor_infer.request_timeout) == (
        math.inf,
        math.inf,
        math.inf,
    )
    assert (manager.max_env_retries, manager.max_env_failure_rate) == (0, 0.0)
    assert {env.step for env in got.custom_envs.values()} == {"inline"}
    assert len(run(got).trajectories) == 1


def test_a_person_has_no_time_limit(config: RunConfig) -> None:
    got = play.patient(config)
    assert got.actor_infer.request_timeout == math.inf
    assert got.custom_envs == config.custom_envs


# ---------------------------------------------------------------- who plays


def test_a_player_plays_the_tasks_without_a_model(config: RunConfig) -> None:
    played = run(play.with_tasks(config), player=Choice("first"))
    assert [(t.tag, t.group) for t in played.trajectories] == [("A", 0), ("A", 1), ("A", 2), ("B", 3), ("B", 4)]
    assert {turn.text for t in played.trajectories for turn in t.turns} == {"a"}  # the first legal action
    values = play.summary(play.with_tasks(config), played)
    assert (
        values["val/A/score/mean"],
        values["val/B/score/mean"],
        values["val/A/success"],
        values["val/A/failed"],
    ) == (3.0, 2.0, 1.0, 0.0)


def test_the_model_of_pretrain_plays_the_same_twice_and_other_tasks_under_another_seed(config: RunConfig) -> None:
    def seen(seed: int | None = None) -> list[Any]:
        return [
            [t.final_observation, *(turn.text for turn in t.turns)]
            for t in run(play.with_tasks(config, seed=seed)).trajectories
        ]

    assert seen() == seen()
    assert seen() != seen(5)


def test_a_backend_that_plays_knows_that_no_weights_will_come(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, init = list[InferenceContext](), FakeBackend.__init__

    def noting(self: FakeBackend, config: Any, context: InferenceContext) -> None:
        built.append(context)
        init(self, config, context)

    monkeypatch.setattr(FakeBackend, "__init__", noting)
    run(play.with_tasks(config))
    (context,) = built
    assert not context.updates and context.needs_its_model
    assert not evolve(context, updates=True).needs_its_model
    assert evolve(context, updates=True, lora=Lora(4, 8)).needs_its_model


def test_a_model_is_known_by_its_folder_and_by_its_name_in_the_hubs_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--name" / "snapshots" / "0a1b"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    context = InferenceContext(folder, None)
    assert all(context.is_model(named) for named in ("owner/name", str(folder), str(tmp_path / "link"), f"{folder}/"))
    assert not any(context.is_model(named) for named in ("owner/names", "name", "/other", ""))
    assert not InferenceContext(None, None).is_model("owner/name")


def test_a_backend_with_tokens_may_play_too(config: RunConfig) -> None:
    player = evolve(config, actor_infer=evolve(config.actor_infer, strategy_args=None))  # whatever the YAML has there
    played = run(play.with_tasks(player), player=Choice("fake_backend"))
    assert all(turn.response_ids.size for t in played.trajectories for turn in t.turns)


def test_frames_of_the_first_episodes_of_each_tag_come_along(config: RunConfig) -> None:
    played = run(play.with_tasks(config), player=Choice("first"), render=1)
    assert {key: len(frames) for key, frames in played.frames.items()} == {("A", 0, 0): 4, ("B", 3, 0): 3}


def test_the_backend_is_closed_when_the_environments_cannot_be_built(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    async def close(self: FakeBackend) -> None:
        closed.append(True)

    monkeypatch.setattr(FakeBackend, "close", close)
    bad = evolve(config, custom_envs={t: CustomEnv("fake", {"length": []}, Choice("fake")) for t in "AB"})
    monkeypatch.setattr(assembly, "number_of_tasks", lambda *_: (_ for _ in ()).throw(ConfigError("cannot be built")))
    with pytest.raises(ConfigError, match="cannot be built"):
        run(play.with_tasks(bad))
    assert closed == [True]


# ---------------------------------------------------------------- which model


async def exports(folder: Path) -> None:
    save_model(folder / "model", initial_weights(seed=1))


def test_a_model_is_named_by_folder_checkpoint_or_latest(config: RunConfig, tmp_path: Path) -> None:
    root, meant = tmp_path / "out" / "checkpoints", partial(play.model_folder, config=config)
    with (
        pytest.raises(
            CheckpointError, match=r"out/checkpoints holds no checkpoint\. Fix: train first, or name a model folder\."
        ),
        meant("latest"),
    ):
        pass
    folders = [asyncio.run(checkpoint.save(root, step, {}, exports)) for step in (2, 10)]
    for named, expected in (
        ("latest", folders[1] / "model"),
        (str(folders[0]), folders[0] / "model"),
        (str(folders[0] / "model"), folders[0] / "model"),
    ):
        with meant(named) as found:
            assert found.resolve() == expected
    assert run(play.with_tasks(config), model="latest").trajectories
    (folders[1] / "model" / "weights.npy").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="is cut short"), meant("latest"):
        pass
    with pytest.raises(ConfigError, match="--model: 'nowhere' is no folder"):
        run(play.with_tasks(config), model="nowhere")


def test_a_checkpoint_that_plays_is_not_pruned_and_one_that_was_pruned_gives_way_to_a_newer(
    config: RunConfig, tmp_path: Path
) -> None:
    root = tmp_path / "out" / "checkpoints"
    old, new = (asyncio.run(checkpoint.save(root, step, {}, exports)) for step in (1, 2))
    with play.model_folder(str(old), config):
        checkpoint.prune(root, 1)
        assert old.is_dir()
    checkpoint.prune(root, 1)
    assert not old.exists()
    with play.model_folder("latest", config) as folder:
        asyncio.run(checkpoint.save(root, 3, {}, exports))
        checkpoint.prune(root, 1)
        assert folder.resolve() == new / "model"
        assert folder.is_dir()
    checkpoint.prune(root, 1)
    assert [path.name for path in root.iterdir()] == ["checkpoint-000003"]


# ---------------------------------------------------------------- the environments' own texts


def texts(config: RunConfig) -> list[tuple[str, str]]:
    """(role, text) of each."""
    return [(message["role"], message["content"]) for message in assembly.texts(config, Path())]


def test_the_texts_are_those_that_a_model_would_see_and_the_legal_actions(config: RunConfig) -> None:
    seen = texts(config)
    assert seen == texts(config)
    assert len(seen) == len(set(seen))
    assert {("assistant", "a"), ("assistant", "b")} <= set(seen)
    counts = [text for role, text in seen if role == "user" and text.startswith("count ")]
    assert len(counts) > 100  # 64 episodes of each tag begin at random numbers
    assert seen != texts(evolve(config, seed=9))


def test_texts_can_be_asked_for_while_a_loop_runs_and_leave_no_thread(config: RunConfig) -> None:
    async def inside() -> list[tuple[str, str]]:
        return texts(config)

    assert asyncio.run(inside()) == texts(config)
    assert not [t for t in threading.enumerate() if t.name.startswith("turnwise-texts")]


def test_limits_of_a_tag_follow_from_the_sampling(config: RunConfig) -> None:
    env = evolve(config.custom_envs["A"], max_tokens_per_step=None)
    args = GeneratingArgs(max_new_tokens=9)
    got = assembly.limits(config, env, args)
    assert (got.sequence_length, got.max_new_tokens, got.max_tokens_per_step, got.max_turns, got.max_prompt_length) == (
        64,
        9,
        9,
        3,
        55,
    )
    assert assembly.limits(config, evolve(env, max_tokens_per_step=4), args).max_tokens_per_step == 4
    assert assembly.planned_episodes(EnvManagerConfig(3, 2, ("A", "B"), (2, 1))) == {"A": 4, "B": 2}


def test_sizes_reach_what_keeps_them(config: RunConfig) -> None:
    sized = evolve(
        config,
        model_update_buffer_size_mb=3,
        train_env_manager=evolve(config.train_env_manager, max_env_num_per_worker=7),
    )
    assert assembly.train_context(sized, sized.actor_train, "actor_train", Path()).bucket_bytes == 3 * 2**20
    backend = FakeBackend(None, InferenceContext(None, None))
    scheduler = assembly.scheduler(sized, Path(), backend, None, evaluation=False)
    assert scheduler.settings.max_concurrent == 7


@pytest.mark.parametrize(("here", "devices"), [(True, (3,)), (False, ())])
def test_devices_that_a_runtime_has_elsewhere_are_not_the_engines_here(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, here: bool, devices: tuple[int, ...]
) -> None:
    """The engine of an evaluation is built in this process, also where the runtime is not installed."""
    seen: list[tuple[int, ...]] = []

    def build(self: FakeBackend, own: Any, context: Any, init: Any = FakeBackend.__init__) -> None:
        seen.append(context.devices)
        init(self, own, context)

    monkeypatch.setattr(FakeBackend, "__init__", build)
    runtime = Choice("not_installed", config=SimpleNamespace(capabilities=RuntimeCapabilities(counts_devices=here)))
    run(evolve(config, runtime=runtime, actor_infer=evolve(config.actor_infer, device_mapping=(3,))))
    assert seen == [devices]
