"""`turnwise plan` of a run that plays ahead: how old a token gets and how much there is of it, the memory that it takes,
and the time of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from turnwise.cli.main import main
from turnwise.testing.runs import LAKE, written

ROOT = Path(__file__).resolve().parent.parent
QWEN = str(ROOT / "examples" / "models" / "Qwen2.5-0.5B-Instruct")
PARAMETERS = 494_032_768
WAY = "weight_update=between_turns"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """The small run on hf and torch in one process, with a model whose sizes are known."""
    path = tmp_path / "run.yaml"
    path.write_text(written(LAKE, {"pretrain": QWEN}), encoding="utf-8")
    return path


def plan(*arguments: Any) -> str:
    done = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def values(*arguments: Any) -> dict[str, Any]:
    return dict(json.loads(plan(*arguments, "--json")))


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_the_bound_on_age_and_what_may_be_played_ahead(lake: Path, ratio: int) -> None:
    # 2 groups of 4 episodes of at most 4 turns of at most 2 tokens.
    ahead = values(lake, f"async_generation_ratio={ratio}", WAY)["staleness"]
    assert ahead == {
        "steps": ratio,
        "groups": 2 * ratio,
        "episodes": 8 * ratio,
        "tokens": 8 * 4 * 2 * ratio,
        "weight_update": "between_turns",
    }
    assert (
        f"staleness      at most {ratio} step{'s' * (ratio > 1)}; played ahead, between turns: at most {2 * ratio}"
        f" groups, {8 * ratio} trajectories, {64 * ratio} sampled tokens\n"
    ) in plan(lake, f"async_generation_ratio={ratio}", WAY)


def test_nothing_of_it_where_nothing_is_played_ahead(lake: Path) -> None:
    assert (values(lake)["staleness"], values(lake)["copied"]) == (None, None)
    assert "staleness" not in plan(lake)
    assert "copy of the weights" not in plan(lake)


def test_the_memory_that_it_takes(lake: Path) -> None:
    alone, ahead = values(lake), values(lake, "async_generation_ratio=2")
    assert ahead["copied"] == 4 * PARAMETERS  # in fp32, which the sampler shares with the trainer otherwise
    assert ahead["cpu"]["rollout"] == 3 * alone["cpu"]["rollout"]
    for other in ("log_probs", "advantages"):
        assert ahead["cpu"][other] == alone["cpu"][other]
    extra = ahead["one_process"]["total"] - alone["one_process"]["total"]
    assert extra == 4 * PARAMETERS + 2 * alone["cpu"]["rollout"]
    assert "actor_infer: 1.98 GB are a copy of the weights, which playing ahead needs" in plan(
        lake, "async_generation_ratio=2"
    )


def test_pictures_that_were_played_ahead_are_kept_too() -> None:
    """Set-up A reads images, and its sampler has weights of its own anyway."""
    file = ROOT / "examples" / "vision_agent_zero3.yaml"
    apart = ["actor_infer.device_mapping=[8,9]", "async_generation_ratio=1"]
    assert values(file, *apart)["cpu"]["images"] == 2 * values(file)["cpu"]["images"]
    assert values(file, *apart)["copied"] is None


@pytest.mark.parametrize(
    ("rollout", "training", "a_step"), [(5.0, 2.0, 5.0), (2.0, 5.0, 5.0), (2.0, 2.0, 2.0), (0.0, 3.0, 3.0)]
)
def test_a_step_takes_as_long_as_the_slower_side_and_not_their_sum(
    lake: Path, rollout: float, training: float, a_step: float
) -> None:
    earlier = lake.parent / "earlier"
    earlier.mkdir()
    phases = {"time/rollout": rollout, "time/actor_train": 0.75 * training, "time/sync": 0.25 * training}
    line = {"step": 0, **phases, "time/step": rollout + training}
    (earlier / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    together = values(lake, "--from", earlier)["time"]
    assert (together["step"], together["one_after_the_other"]) == (rollout + training, None)
    ahead = values(lake, "async_generation_ratio=1", "--from", earlier)["time"]
    assert (ahead["step"], ahead["one_after_the_other"]) == (a_step, rollout + training)
    assert ahead["total"] == 2 * a_step
    text = plan(lake, "async_generation_ratio=1", "--from", earlier)
    assert f"the slower of rollout and training ({rollout + training:.3g} s one after the other)" in text


@pytest.mark.parametrize("ratio", [0, 1, 2, 4])
@pytest.mark.parametrize("way", ["between_batches", "between_turns", "between_tokens"])
def test_more_than_one_is_said_to_be_staler_and_no_faster_between_batches(lake: Path, ratio: int, way: str) -> None:
    told = [
        line
        for line in values(lake, f"async_generation_ratio={ratio}", f"weight_update={way}")["warnings"]
        if "staler and no faster" in line
    ]
    assert told == (
        [
            f"async_generation_ratio {ratio} with weight_update between_batches: one batch is played while one is"
            " trained whatever the ratio, so more than 1 is staler and no faster. Fix: 1"
        ]
        if ratio > 1 and way == "between_batches"
        else []
    )


def test_calls_beside_the_answer_count_as_sampled_tokens(lake: Path) -> None:
    """The example manager that reflects asks the model twice for a step of the environment."""
    reflecting = [
        f"plugins=[{', '.join(LAKE['plugins'])}, {ROOT / 'examples' / 'managers' / 'reflect.py'}]",
        "custom_envs.Lake.env_manager=reflect",
        "async_generation_ratio=1",
    ]
    found = values(lake, *reflecting)
    assert found["staleness"]["tokens"] == found["tokens_per_step"]["sampled"] == 8 * 4 * 2 * 2
