"""The number line keeps the contract of an environment and plays as its docstring says."""

from number_line import NumberLine

from turnwise.plugins import registry
from turnwise.testing.kit import run_conformance


def test_it_keeps_the_contract() -> None:
    registry().declare(["turnwise-number-line"])
    assert run_conformance("number_line", "environment", strict=True) == 0


def test_walking_toward_the_goal_reaches_it() -> None:
    line = NumberLine(longest=3)
    for seed in range(20):
        observation, _ = line.reset(seed=seed)
        direction, steps = observation.rstrip(".").split()[-1], int(observation.split()[3])
        walked = [line.step(direction) for _ in range(steps)]
        assert [step[1] for step in walked] == [0.0] * (steps - 1) + [1.0]
        assert walked[-1][2]
        assert walked[-1][4]["success"]


def test_a_word_that_is_no_direction_costs_a_tenth_and_moves_nothing() -> None:
    line = NumberLine()
    observation, _ = line.reset(seed=0)
    assert line.step("up")[:3] == (observation, -0.1, False)
    assert line.step("")[:3] == (observation, -0.1, False)
