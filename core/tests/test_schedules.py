"""Learning rates: the reference numbers, equality with transformers at one update a step, and what a wrong schedule is
reported."""

from __future__ import annotations

import math
from typing import Any

import pytest

from turnwise.errors import ConfigError
from turnwise.planning.schedules import SCHEDULES, Schedule, learning_rate, warmup_steps_of

OURS = {
    (0, "linear"): {(100, 0, 1): 0.5, (123, 0, 1): 0.385, (199, 0, 1): 0.005, (199, 1, 2): 0.0025},
    (0, "cosine"): {(100, 0, 1): 0.5, (123, 0, 1): 0.323262578, (199, 0, 1): 6.1684e-5, (199, 1, 2): 1.5421e-5},
    (10, "linear"): {
        (0, 0, 1): 0.0,
        (0, 1, 2): 0.05,
        (9, 1, 2): 0.95,
        (10, 0, 1): 1.0,
        (10, 1, 2): 0.997368421,
        (105, 0, 1): 0.5,
        (199, 0, 1): 0.005263158,
    },
    (10, "cosine"): {
        (0, 0, 1): 0.0,
        (0, 1, 2): 0.05,
        (9, 1, 2): 0.95,
        (10, 0, 1): 1.0,
        (10, 1, 2): 0.999982913,
        (105, 0, 1): 0.5,
        (199, 0, 1): 6.8348e-5,
    },
}


@pytest.mark.parametrize(
    ("warmup", "name", "at", "expected"),
    [(w, name, at, rate) for (w, name), table in OURS.items() for at, rate in table.items()],
)
def test_reference_numbers(warmup: int, name: str, at: tuple[int, int, int], expected: float) -> None:
    p, k, n = at
    tolerance = 1e-9 if expected < 1e-3 else 1e-6
    assert learning_rate(1.0, Schedule(name, warmup), p, k, n, max_steps=200) == pytest.approx(expected, abs=tolerance)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_min_lr", {"min_lr": 2e-7}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.75}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 3e-7, "power": 2.5}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 25}),
    ("warmup_stable_decay", {"num_decay_steps": 15}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.2, "warmup_type": "cosine"},
    ),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 12, "num_stable_steps": 5, "decay_type": "1-sqrt", "warmup_type": "1-sqrt"},
    ),
    ("warmup_stable_decay", {"num_decay_steps": 12, "num_cycles": 1.5, "min_lr_ratio": 0.05}),
]


@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
def test_equals_transformers_at_one_update_a_step(name: str, kwargs: dict[str, Any], warmup: int) -> None:
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    base, max_steps = 5e-6, 40
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    theirs = optimization.get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=max_steps, scheduler_specific_kwargs=dict(kwargs)
    )
    ours = Schedule(name, warmup, kwargs)
    assert ours.check(base, max_steps) == []
    for p in range(max_steps):
        assert learning_rate(base, ours, p, 0, 1, max_steps) == pytest.approx(
            theirs.get_last_lr()[0], rel=1e-12, abs=1e-20
        ), p
        optimizer.step()
        theirs.step()


def test_every_schedule_is_compared() -> None:
    assert {name for name, _ in VARIANTS} == set(SCHEDULES)


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("updates", [1, 3, 40])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [v for v in VARIANTS if v[0] in ("linear", "polynomial", "cosine_with_min_lr", "constant_with_warmup")],
)
def test_only_the_very_first_update_may_have_rate_zero(
    name: str, kwargs: dict[str, Any], updates: int, warmup: int
) -> None:
    rates = [
        learning_rate(5e-6, Schedule(name, warmup, kwargs), p, k, updates, 40)
        for p in range(40)
        for k in range(updates)
    ]
    assert (rates[0] == 0) == (warmup > 0)
    assert min(rates[1:]) > 0
    assert max(rates) <= 5e-6 * (1 + 1e-12)


def test_wsd_is_an_alias() -> None:
    assert Schedule("wsd", 2, {"num_decay_steps": 5}) == Schedule("warmup_stable_decay", 2, {"num_decay_steps": 5})


NUMBER_OF_UPDATES = {p: 2 for span in (range(22, 32), range(65, 70), range(109, 116), range(124, 156)) for p in span}
NUMBER_OF_UPDATES |= {2: 15, 21: 20, 64: 11, 108: 12, 123: 6}


def test_a_run_that_cut_trajectories_into_rows_never_trains_at_rate_zero() -> None:
    per_step = [NUMBER_OF_UPDATES.get(p, 1) for p in range(200)]
    assert sum(per_step) == 313
    assert [sum(per_step[: p + 1]) for p in (0, 2, 21, 64, 108, 123)] == [1, 17, 55, 118, 178, 205]
    rates = [learning_rate(1.0, Schedule("linear"), p, k, n, 200) for p, n in enumerate(per_step) for k in range(n)]
    assert min(rates) == rates[-1] == pytest.approx(0.005)
    assert rates == sorted(rates, reverse=True)
    before = sum(per_step[:123])
    expected = [0.385, 0.3841667, 0.3833333, 0.3825, 0.3816667, 0.3808333]
    assert rates[before : before + 6] == pytest.approx(expected, abs=1e-6)
    peers = [max(0.0, 1.0 - update / 200) for update in range(313)]
    assert peers[200:] == [0.0] * 113
    assert before <= 200 < before + 6


@pytest.mark.parametrize(
    ("name", "kwargs", "line"),
    [
        (
            "linaer",
            {},
            (
                "lr_scheduler_type: 'linaer' is unknown. Did you mean 'linear'? Known: constant, constant_with_warmup,"
                " cosine, "
            ),
        ),
        (
            "cosine_with_min_lr",
            {"min_rl": 1e-7},
            "lr_scheduler_kwargs.min_rl: unknown for the schedule cosine_with_min_lr. Did you mean 'min_lr'?",
        ),
        ("linear", {"num_cycles": 1}, "lr_scheduler_kwargs.num_cycles: unknown for the schedule linear. Known: none"),
        ("cosine_with_min_lr", {}, "lr_scheduler_kwargs: cosine_with_min_lr needs either min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0.0, "min_lr_rate": 0.1}, "needs either min_lr or min_lr_rate"),
        (
            "cosine_with_min_lr",
            {"min_lr_rate": 3},
            "lr_scheduler_kwargs.min_lr_rate: 3 is a share of the learning rate and above 1",
        ),
        ("polynomial", {"power": "2"}, "lr_scheduler_kwargs.power: '2' is not a number"),
        ("polynomial", {"power": True}, "lr_scheduler_kwargs.power: True is not a number"),
        ("polynomial", {"lr_end": math.nan}, "lr_scheduler_kwargs.lr_end: nan is not a number"),
        ("polynomial", {"lr_end": -1e-7}, "lr_scheduler_kwargs.lr_end: -1e-07 is negative"),
        ("inverse_sqrt", {"timescale": 0}, "lr_scheduler_kwargs.timescale: 0 is not positive"),
        ("wsd", {}, "lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps"),
        (
            "wsd",
            {"num_decay_steps": 5, "decay_type": "cosin"},
            "lr_scheduler_kwargs.decay_type: 'cosin' is unknown. Did you mean 'cosine'?",
        ),
    ],
)
def test_a_wrong_schedule_is_reported_in_one_line(name: str, kwargs: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        Schedule(name, 0, kwargs)
    assert any(line in problem for problem in error.value.problems)
    assert all("\n" not in problem and "Fix: " in problem for problem in error.value.problems)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Schedule("polynomial", -1, {"power": "x", "lr_ned": 1})
    assert len(error.value.problems) == 3


def test_ends_that_do_not_fit_the_run_are_reported_by_check() -> None:
    (end,) = Schedule("polynomial").check(1e-7, 10)
    assert end.path == "lr_scheduler_kwargs.lr_end"
    assert end.text.startswith("1e-07 is not below learning_rate 1e-07. Fix: ")
    (floor,) = Schedule("cosine_with_min_lr", 0, {"min_lr": 1e-5}).check(1e-6, 10)
    assert floor.path == "lr_scheduler_kwargs.min_lr"
    assert floor.text.startswith("1e-05 is not below learning_rate 1e-06. Fix: ")
    assert len(Schedule("wsd", 5, {"num_decay_steps": 6}).check(1e-6, 10)) == 1
    assert Schedule("wsd", 4, {"num_decay_steps": 6}).check(1e-6, 10) == []


def test_a_schedule_that_ends_at_a_rate_needs_the_base() -> None:
    with pytest.raises(ValueError, match="needs base"):
        Schedule("polynomial").multiplier(0, 10)
    with pytest.raises(ValueError, match="needs base"):
        Schedule("cosine_with_min_lr", 0, {"min_lr": 1e-7}).multiplier(0, 10)
    assert Schedule("cosine_with_min_lr", 0, {"min_lr_rate": 0.5}).multiplier(0, 10) == 1.0


@pytest.mark.parametrize(
    ("ratio", "steps", "expected"),
    [(0.07, 100, 7), (0.1, 30, 3), (0.03, 200, 6), (0.031, 200, 7), (0.0, 50, 0), (1.0, 9, 9), (1e-5, 10, 1)],
)
def test_a_ratio_is_rounded_up_from_the_decimal_that_was_written(ratio: float, steps: int, expected: int) -> None:
    assert warmup_steps_of(0, ratio, steps) == expected


def test_warmup_steps_go_before_the_ratio_and_a_ratio_is_a_share() -> None:
    assert warmup_steps_of(4, 0.5, 100) == 4
    with pytest.raises(ConfigError, match=r"warmup_ratio: 1\.5"):
        warmup_steps_of(0, 1.5, 100)
