"""The arithmetic of a run: a small one by hand, three reference set-ups, learning rates, and what gives reason to
warn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve, frozen

from turnwise.config.schema import Choice, CustomEnv, EnvManagerConfig, Role, RunConfig, TrainingArgs
from turnwise.contracts.env_manager import ManagerCapabilities
from turnwise.contracts.train import StrategyCapabilities
from turnwise.hookspecs import Implementation
from turnwise.planning import estimates
from turnwise.planning import plan as planning
from turnwise.testing.compare import says
from turnwise.testing.registered import registered


class Cutting:
    """An environment manager that makes a row of every turn."""

    capabilities = ManagerCapabilities(row_per_turn=True)


class SelfPlay:
    """An environment manager of two roles, each of which thinks twice before it acts and makes a row of every call."""

    capabilities = ManagerCapabilities(row_per_turn=True, calls_per_step=2, roles=("first", "second"))


class PerRow:
    """A policy that makes an update of every row."""

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def updates(self, rows: int) -> int:
        return rows


@pytest.fixture(autouse=True)
def _fakes() -> Iterator[None]:
    records = (
        ("env_manager", Implementation("cutting", Cutting)),
        ("env_manager", Implementation("self_play", SelfPlay)),
        ("env_manager", Implementation("absent", "nowhere:Absent", requires=("package_that_is_not_there",))),
        ("batch_adjust", Implementation("per_row", PerRow)),
    )
    with registered(*records, plugins=["turnwise.testing.plugin"]):
        yield


@frozen
class Parallel:
    """The configuration of a strategy that splits a model over `tp` devices."""

    tp: int = 1

    @property
    def capabilities(self) -> StrategyCapabilities:
        return StrategyCapabilities(data_parallel_size=self.data_parallel_size)

    def data_parallel_size(self, world: int) -> int:
        return world // self.tp


def manager(groups: int, size: int, **more: Any) -> EnvManagerConfig:
    return EnvManagerConfig(num_env_groups=groups, group_size=size, tags=("T",), num_groups_partition=(groups,), **more)


def run_of(groups: int, size: int, steps: int, *, devices: int = 0, tp: int = 1, **changes: Any) -> RunConfig:
    args = {k: changes.pop(k) for k in list(changes) if k in {a.name for a in TrainingArgs.__attrs_attrs__}}  # type: ignore[attr-defined]
    role = Role(
        training_args=TrainingArgs(**args),
        device_mapping=tuple(range(devices)),
        strategy_args=Choice("x", {}, Parallel(tp)),
    )
    base = RunConfig(
        max_steps=steps,
        rollout_batch_size=groups * size,
        pretrain="m",
        train_env_manager=manager(groups, size),
        custom_envs={"T": CustomEnv("fake", max_steps=5)},
        actor_train=role,
        batch_adjust_mode=Choice("fake_adjust"),
    )
    return evolve(base, **changes)


def test_a_small_run_by_hand() -> None:
    config = run_of(
        3, 4, 10, devices=2, per_device_train_batch_size=3, learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=2,
        ppo_epochs=2, eval_steps=4, val_env_manager=manager(5, 2),
    )  # fmt: skip
    assert planning.arithmetic(config) == {
        "data_parallel_size": 2,
        "mini_batch": 6,
        "unit": 6,
        "rollout_batch_size": 12,
        "groups": 3,
        "group_size": 4,
        "rows_per_step": [12, 12],
        "updates_per_step": [4, 4],
        "max_steps": 10,
        "updates": [40, 40],
        "trajectories": 120,
        "evaluations": 3,  # before steps 0, 4 and 8
        "evaluation_trajectories": 30,
        "evaluations_at_end": 1,
        "staleness": None,
        "merged": False,
        "critic": None,
        "warmup_steps": 2,
        "warmup_updates": [8, 8],
        "learning_rate": {"start": 0.0, "middle": pytest.approx((10 - 5) / 8), "end": pytest.approx((10 - 9.75) / 8)},
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (  # A: vision agent, colocated
            run_of(
                64,
                8,
                1024,
                devices=8,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=16,
                eval_steps=10,
                val_env_manager=manager(512, 1),
            ),
            (8, 16, 256, [2, 2], [2048, 2048], 524_288, 103, 52_736, 1),
        ),
        (  # B: agent, disaggregated
            run_of(
                128,
                8,
                1024,
                devices=4,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=128,
                eval_steps=10,
                val_env_manager=manager(1024, 1),
            ),
            (4, 8, 1024, [1, 1], [1024, 1024], 1_048_576, 103, 105_472, 1),
        ),
        (  # C: single-turn verifiable rewards
            run_of(64, 8, 1000, devices=16, tp=2, per_device_train_batch_size=1, gradient_accumulation_steps=64),
            (8, 8, 512, [1, 1], [1000, 1000], 512_000, 0, 0, 0),
        ),
    ],
    ids=["A", "B", "C"],
)
def test_the_reference_set_ups_give_their_numbers(config: RunConfig, expected: tuple[Any, ...]) -> None:
    keys = (
        "data_parallel_size", "mini_batch", "unit", "updates_per_step", "updates", "trajectories", "evaluations", "evaluation_trajectories",
        "evaluations_at_end",
    )  # fmt: skip
    values = planning.arithmetic(config)
    assert tuple(values[key] for key in keys) == expected


def test_a_critic_has_its_own_updates_and_rates() -> None:
    args = TrainingArgs(
        learning_rate=8.0,
        lr_scheduler_type="linear",
        warmup_ratio=0.5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    config = run_of(3, 4, 8, per_device_train_batch_size=12, critic=Role(training_args=args), ppo_epochs=2)
    values = planning.arithmetic(config)
    assert (values["unit"], values["updates_per_step"], values["warmup_updates"]) == (12, [2, 2], [0, 0])
    assert values["critic"] == {
        "data_parallel_size": 1,
        "mini_batch": 2,
        "unit": 4,
        "updates_per_step": [6, 6],
        "updates": [48, 48],
        "warmup_steps": 4,
        "warmup_updates": [24, 24],
        "learning_rate": {"start": 0.0, "middle": 8.0, "end": pytest.approx(8.0 * (8 - (7 + 5 / 6)) / 4)},
    }
    assert planning.warnings(config, values) == [
        "critic: warmup_steps = 4 counts pipeline steps; the very first update has learning rate 0"
    ]
    assert planning.render(values).splitlines()[-4:] == [
        "critic         unit: U = 4 (mini-batch 2, data parallel 1)",
        "               updates: 6 a step, 48 in 8 steps",
        "               learning rate: start 0, middle 8, end 0.3333",
        "               warm-up: 4 pipeline steps = 24 updates",
    ]


@frozen
class Merging:
    """Options of an environment manager that joins turns."""

    merge: bool = True

    @property
    def capabilities(self) -> ManagerCapabilities:
        return ManagerCapabilities(row_per_turn=True, joins_turns=self.merge)


@pytest.mark.parametrize("merge", [True, False])
def test_joined_turns_are_between_a_row_an_episode_and_a_row_a_turn(merge: bool) -> None:
    tag = CustomEnv("fake", max_steps=5, env_manager=Choice("cutting", {}, Merging(merge)))
    values = planning.arithmetic(run_of(3, 4, 10, custom_envs={"T": tag}))
    assert (values["rows_per_step"], values["merged"]) == ([12, 60], merge)
    joined = ": turns whose prompts continue each other make one row" if merge else ""
    assert f"rows           12 to 60 a step{joined}" in planning.render(values).splitlines()
    played = EnvManagerConfig(num_env_groups=1, group_size=1, tags=("S",), num_groups_partition=(1,))
    other = run_of(3, 4, 10, custom_envs={"T": tag, "S": CustomEnv("fake")}, train_env_manager=played)
    assert planning.merges(other) is False  # a tag that does not train


def test_every_call_of_a_step_may_sample_its_tokens() -> None:
    tags = {"T": CustomEnv("e", max_steps=9, env_manager=Choice("self_play"))}
    alone = EnvManagerConfig(num_env_groups=2, group_size=2, tags=("T",), num_groups_partition=(2,))
    config = run_of(5, 2, 1, train_env_manager=alone, custom_envs=tags, sequence_length=10**6)
    longest = config.actor_infer.generating_args.max_new_tokens
    assert estimates.tokens_per_step(config)["sampled"] == 4 * 9 * 2 * longest


@pytest.mark.parametrize(
    ("manager_name", "fewest", "most"),
    [
        ("cutting", 10, 4 + 6 * 7),
        ("self_play", 4 + 6 * 2, 4 + 6 * 2 * 7 * 2),
        ("fake_manager", 10, 10),
        ("absent", 10, 10),
    ],
)
def test_rows_of_a_tag_depend_on_its_turns_where_its_manager_cuts_a_row_of_each(
    manager_name: str, fewest: int, most: int
) -> None:
    two = EnvManagerConfig(num_env_groups=5, group_size=2, tags=("T", "S"), num_groups_partition=(2, 3))
    config = run_of(5, 2, 1, train_env_manager=two)
    tags = {
        "T": CustomEnv("e", max_steps=9, env_manager=Choice("fake")),
        "S": CustomEnv("e", max_steps=7, env_manager=Choice(manager_name)),
    }
    assert planning.rows_per_step(evolve(config, custom_envs=tags)) == (fewest, most)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eval_steps": 4}, (3, 1)),
        ({"eval_steps": 5}, (2, 1)),
        ({"eval_steps": 100}, (1, 1)),
        ({"eval_steps": 4, "eval_at_end": False}, (3, 0)),
        ({"eval_steps": 0}, (0, 0)),
        ({"eval_steps": None}, (0, 0)),
        ({"eval_steps": 4, "val_env_manager": None}, (0, 0)),
    ],
)
def test_evaluations_are_counted_as_they_will_be_played(changes: dict[str, Any], expected: tuple[int, int]) -> None:
    values = planning.arithmetic(run_of(2, 2, 10, **{"val_env_manager": manager(3, 1), **changes}))
    assert (values["evaluations"], values["evaluations_at_end"]) == expected
    assert values["evaluation_trajectories"] == 3 * expected[0]


def warned(**changes: Any) -> list[str]:
    config = run_of(4, 1, 10, **changes)
    return planning.warnings(config, planning.arithmetic(config))


def test_warm_up_is_explained_and_one_without_effect_is_named() -> None:
    assert warned() == []
    (line,) = warned(warmup_steps=3, lr_scheduler_type="linear")
    says(line, "warmup_steps = 3", "pipeline steps", "the very first update has learning rate 0")
    assert warned(warmup_ratio=0.25, lr_scheduler_type="cosine")[0].startswith(
        "warmup_steps = 3 counts pipeline steps; the very first"
    )
    for given in ({"warmup_steps": 3}, {"warmup_ratio": 0.3}):
        (line,) = warned(**given)
        says(line, "warmup_steps = 3 has no effect", "lr_scheduler_type constant", "Fix: constant_with_warmup")
    floor = {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"num_decay_steps": 2, "min_lr_ratio": 0.1}}
    assert warned(warmup_steps=3, **floor) == ["warmup_steps = 3 counts pipeline steps"]


def test_a_last_update_that_learns_nothing_is_reported() -> None:
    early = {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"num_decay_steps": 2, "num_stable_steps": 3}}
    assert warned(**early) == ["the last update has learning rate 0: it learns nothing"]


def test_policies_that_count_rows_are_reported_where_the_rows_vary() -> None:
    cutting = {"custom_envs": {"T": CustomEnv("fake", max_steps=5, env_manager=Choice("cutting"))}}
    assert warned(**cutting) == []  # as many updates, whatever the rows
    assert warned(batch_adjust_mode=Choice("per_row")) == []
    (line,) = warned(**cutting, batch_adjust_mode=Choice("per_row"))
    says(line, "batch_adjust_mode 'per_row'", "counts rows", "the number of updates depends on the turns")


def test_names_that_mean_something_else_elsewhere_are_reported_as_they_stand_here() -> None:
    defaults = [
        "init_kl_coef = 0: no KL penalty in the reward (ROLL's default is 0.2)",
        "lr_scheduler_type = constant (ROLL's default is linear)",
        "loss_agg_mode = token-mean (ROLL's default is seq-mean-token-mean)",
    ]
    assert planning.other_meanings(run_of(4, 1, 10)) == defaults
    clip = "advantage_clip = 0.2 clamps the advantages; the ratio's clip is an option of the loss"
    assert planning.other_meanings(run_of(4, 1, 10, advantage_clip=0.2)) == [clip, *defaults]
    assert planning.other_meanings(run_of(4, 1, 10, init_kl_coef=0.2, loss_agg_mode="seq-mean-token-mean")) == [
        defaults[1]
    ]


def test_the_text_is_aligned_and_ranges_are_spelled() -> None:
    values = planning.arithmetic(run_of(2, 2, 2000, eval_steps=4, val_env_manager=manager(3, 1), learning_rate=0.5))
    values |= {"rows_per_step": [4, 20], "updates_per_step": [1, 5], "updates": [2000, 10_000]}
    assert planning.render(values).splitlines() == [
        "batch          2 groups × 2 = 4 trajectories a step",
        "rows           4 to 20 a step",
        "unit           U = 1 (mini-batch 1, data parallel 1)",
        "updates        1 to 5 a step, 2,000 to 10,000 in 2,000 steps",
        "trajectories   8,000",
        "evaluations    500 with 1,500 trajectories and the final one",
        "learning rate  start 0.5, middle 0.5, end 0.5",
    ]


def test_what_is_played_ahead_is_bounded_in_steps_groups_and_tokens() -> None:
    config = run_of(4, 2, 10)
    assert planning.arithmetic(config)["staleness"] is None
    assert "staleness" not in planning.render(planning.arithmetic(config))
    ahead = evolve(config, async_generation_ratio=2)
    plan = planning.arithmetic(ahead)
    turns, tokens = ahead.custom_envs["T"].max_steps, ahead.actor_infer.generating_args.max_new_tokens
    assert plan["staleness"] == {
        "steps": 2, "groups": 8, "episodes": 16, "tokens": 2 * 8 * turns * tokens, "weight_update": "between_batches",
    }  # fmt: skip
    assert "staleness      at most 2 steps; played ahead, between batches: at most 8 groups" in planning.render(plan)
    stale = [line for line in planning.warnings(ahead, plan) if "staler and no faster" in line]
    assert len(stale) == 1
    once = evolve(config, async_generation_ratio=1)
    assert "no faster" not in " ".join(planning.warnings(once, planning.arithmetic(once)))
