"""The report: before, after and baselines in one table, advice on what is not healthy, and where the model is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from turnwise.config.schema import Choice, EnvManagerConfig, ModelArgs, Role, RunConfig
from turnwise.contracts.logger import LoggerCapabilities
from turnwise.contracts.loss import LossCapabilities
from turnwise.data.normalise import RewardNormalization
from turnwise.hookspecs import Implementation
from turnwise.pipeline import report
from turnwise.pipeline.health import HEALTHY, PRETRAINED_RATE, unhealthy
from turnwise.pipeline.report import History
from turnwise.testing.registered import registered

CONFIG = RunConfig(
    max_steps=9,
    rollout_batch_size=1,
    pretrain={"recipe": {}},
    train_env_manager=EnvManagerConfig(),
    custom_envs={},
    exp_name="lake",
)


def evaluation(success: float, score: float) -> dict[str, float]:
    return {
        "val/Lake/success": success,
        "val/Lake/score/mean": score,
        "val/Lake/failed": 0.0,
        "val/success": success,
        "val/Lake/odd": 1.0,
    }


def test_the_table_holds_first_last_and_baselines(tmp_path: Path) -> None:
    history = History({0: evaluation(0.1, -0.25), 5: evaluation(0.4, 0.0), 9: evaluation(0.75, 0.5)})
    history.baselines["random"] = evaluation(0.19, -0.1)
    history.baselines["shy"] = {"val/Lake/score/mean": 0.0}
    text = report.write(tmp_path, CONFIG, history, tmp_path / "checkpoint-000009")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == text
    blocks = text.split("\n\n")
    assert blocks[0] == "# lake: 9 steps"
    assert blocks[1].splitlines() == [
        "| player | Lake/success | Lake/score/mean |",
        "|---|---:|---:|",
        "| model at step 0 | 0.100 | -0.250 |",
        "| model at step 9 | 0.750 | 0.500 |",
        "| random | 0.190 | -0.100 |",
        "| shy | – | 0.000 |",
    ]
    assert (
        blocks[2] == f"Checkpoint: {tmp_path / 'checkpoint-000009'} (a Hugging Face folder:"
        f" {tmp_path / 'checkpoint-000009' / 'model'})\n"
    )


def test_one_evaluation_is_one_row_and_none_no_table(tmp_path: Path) -> None:
    one = report.write(tmp_path, CONFIG, History({0: evaluation(0.1, 0.2)}), None)
    assert one.count("model at step") == 1
    assert report.write(tmp_path, CONFIG, History(), None) == "# lake: 9 steps\n"


def run_of(**changes: Any) -> RunConfig:
    return evolve(CONFIG, pg_variant=Choice("clipped", {}, Clipped()), adv_estimator=Choice("centring"), **changes)


@frozen
class Clipped:
    capabilities = LossCapabilities(clips=True)


class Centring:
    def __init__(self, config: Any, context: Any) -> None:
        self.normalization = RewardNormalization(grouping="traj_group_id", method="mean")


class Dividing:
    def __init__(self, config: Any, context: Any) -> None:
        self.normalization = RewardNormalization(grouping="traj_group_id", method="mean", norm_std_type="batch")


class AsItIs:
    def __init__(self, config: Any, context: Any) -> None:
        self.normalization = RewardNormalization(grouping="batch", method="identity")


class Drawing:
    capabilities = LoggerCapabilities(pictures=("a.png", "b.png"))


@pytest.fixture(autouse=True)
def _fakes() -> Iterator[None]:
    records = (
        ("advantage_estimator", Implementation("centring", Centring)),
        ("advantage_estimator", Implementation("dividing", Dividing)),
        ("advantage_estimator", Implementation("as_it_is", AsItIs)),
        ("logger", Implementation("drawing", Drawing)),
        ("logger", Implementation("silent", object)),
    )
    with registered(*records):
        yield


SEVERAL = {"policy/updates": 4.0}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"policy/approx_kl": 0.049, "policy/clip_frac": 0.3, "policy/entropy": 0.1}, []),
        (
            {"policy/approx_kl": 0.051, "policy/clip_frac": 0.31, "policy/entropy": 0.09},
            ["policy/approx_kl", "policy/clip_frac", "policy/entropy"],
        ),
        ({"policy/clip_frac": 0.09, **SEVERAL}, ["policy/clip_frac"]),
        ({"policy/clip_frac": 0.1, **SEVERAL}, []),
        ({"policy/clip_frac": 0.0, "policy/updates": 1.0}, []),  # one update a step: nothing to clip
        ({"policy/entropy": float("nan")}, ["policy/entropy"]),
        ({"policy/learning_rate": 0.0}, ["policy/learning_rate"]),
        ({"policy/learning_rate": 1e-12}, []),
        ({"critic/reward/mean": 0.1}, []),
        ({"critic/reward/mean": 0.11}, ["critic/reward/mean"]),
        ({"critic/reward/mean": -0.11}, ["critic/reward/mean"]),
        ({}, []),
    ],
)
def test_metrics_outside_their_healthy_range_get_a_line_of_advice(
    values: dict[str, float], names: list[str], tmp_path: Path
) -> None:
    assert [line.split(" = ")[0] for line in unhealthy(values, run_of())] == names
    text = report.write(tmp_path, run_of(), History(last=values), None)
    assert ("Outside their healthy range at the end:\n- " in text) == bool(names)


@pytest.mark.parametrize(
    ("values", "first"),
    [
        (
            {"group/all_correct_ratio": 1.0, "group/advantage_diff/mean": 0.0},
            "group/all_correct_ratio = 1: every episode succeeds",
        ),
        (
            {"env/A/invalid_actions": 1.0, "env/B/invalid_actions": 1.0},
            "invalid_actions = 1: no answer holds an action",
        ),
        (
            {"group/advantage_diff/mean": 0.0, "env/A/invalid_actions": 0.4},
            "group/advantage_diff/mean = 0: the members of every group",
        ),
    ],
)
def test_where_a_step_taught_nothing_the_cause_is_first_and_no_higher_rate_is_advised(
    values: dict[str, float], first: str
) -> None:
    symptoms = {"policy/clip_frac": 0.0, "policy/entropy": 0.01, **SEVERAL}
    assert "raise learning_rate" in " ".join(unhealthy(symptoms, run_of()))
    lines = unhealthy({**symptoms, **values}, run_of())
    assert lines[0].startswith(first)
    assert [line.split(" = ")[0] for line in lines[1:]] == ["policy/entropy"]
    assert "raise learning_rate" not in " ".join(lines)


def test_each_side_of_a_range_has_its_advice() -> None:
    (few,), (many,) = (unhealthy({"policy/clip_frac": x, **SEVERAL}, run_of()) for x in (0.01, 0.5))
    assert few.startswith("policy/clip_frac = 0.01: few tokens reach the clip")
    assert many.startswith("policy/clip_frac = 0.5: most tokens are clipped")
    assert unhealthy({"policy/approx_kl": float("nan")})[0].startswith(
        "policy/approx_kl = nan: the policy moves too far"
    )


@pytest.mark.parametrize(
    ("estimator", "expected"), [("centring", True), ("dividing", False), ("as_it_is", False), ("unknown", False)]
)
def test_rewards_are_judged_where_a_mean_is_subtracted(estimator: str, expected: bool) -> None:
    config = evolve(run_of(), adv_estimator=Choice(estimator))
    assert bool(unhealthy({"critic/reward/mean": 3.0}, config)) == expected


def test_the_clip_is_judged_where_the_loss_has_one() -> None:
    assert unhealthy({"policy/clip_frac": 0.9, **SEVERAL}, evolve(run_of(), pg_variant=Choice("other"))) == []


@pytest.mark.parametrize(
    ("entropy", "score", "expected"),
    [((3.0, 0.29), (0.5, 0.5), True), ((3.0, 0.29), (0.5, 0.6), False), ((3.0, 0.31), (0.5, 0.4), False)],
)
def test_entropy_that_fell_without_a_better_score_has_collapsed(
    entropy: tuple[float, float], score: tuple[float, float], expected: bool
) -> None:
    first, last = ({"policy/entropy": e, "critic/score/mean": s} for e, s in zip(entropy, score))
    lines = unhealthy(last, run_of(), first)
    assert [line.split(":")[0] for line in lines] == (["policy/entropy fell from 3 to 0.29"] if expected else [])


@pytest.mark.parametrize(
    ("peak", "pretrain", "rank", "expected"),
    [
        (5e-7, "maker/model", None, []),
        (5e-6, "maker/model", None, []),
        (4e-7, "maker/model", None, ["low"]),
        (1e-4, "maker/model", None, ["high"]),
        (1e-4, {"recipe": {}}, None, []),
        (1e-4, "maker/model", 8, []),
    ],
)
def test_the_largest_rate_is_judged_for_a_pretrained_model(
    peak: float, pretrain: Any, rank: int | None, expected: list[str], tmp_path: Path
) -> None:
    config = run_of(pretrain=pretrain, actor_train=Role(model_args=ModelArgs(lora_rank=rank)))
    lines = unhealthy({}, config, None, peak)
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == expected
    history = History(rates={0: [1, 0.0, 0.0], 1: [2, peak, peak / 2], 2: [1, 0.0, 0.0]})
    assert (f"learning rate up to {peak:.4g}: " in report.write(tmp_path, config, history, None)) == bool(expected)


def test_advice_names_its_section_of_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    expected = {
        section
        for healthy in (*HEALTHY.values(), PRETRAINED_RATE)
        for _, section in (healthy.below, healthy.above)
        if section
    }
    assert {section for section in expected if f"\n## {section}\n" not in page} == set()
    for name in HEALTHY:
        assert re.search(r"\(docs/troubleshooting.md: [A-Z][a-z ]+\)$|is 0\)$", unhealthy({name: float("nan")})[0])


def test_the_report_shows_the_learning_rate_that_the_updates_had(tmp_path: Path) -> None:
    history = History()
    for p in range(8):
        history.trained(p, [p / 8, (p + 0.5) / 8])
    history.trained(8, [])
    block = report.write(tmp_path, CONFIG, history, None).split("\n\n", 1)[1].splitlines()
    assert block[:3] == ["Learning rate of 16 updates in 8 steps, 0 to 0.9375:", "", "    ▁▂▃▄▅▆▇█"]
    assert block[4:7] == [
        "| step | updates | first rate | last rate |",
        "|---:|---:|---:|---:|",
        "| 0 | 2 | 0 | 0.0625 |",
    ]
    assert block[-1] == "| 7 | 2 | 0.875 | 0.9375 |"
    assert len(block) == 4 + 2 + 8


def test_the_table_of_rates_is_short_and_holds_the_largest(tmp_path: Path) -> None:
    history = History()
    for p in range(1000):
        history.trained(p, [2.0 if p == 7 else 1.0 - p / 1000])
    lines = report.write(tmp_path, CONFIG, history, None).splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")][1:] == [
        "| 0", "| 7", "| 125", "| 250", "| 375", "| 500", "| 624", "| 749", "| 874", "| 999",
    ]  # fmt: skip
    (bars,) = [line.strip() for line in lines if line.startswith("    ")]
    assert len(bars) == 60
    assert (bars[0], bars[-1]) == ("█", "▁")


@pytest.mark.parametrize(
    ("values", "bars"), [([0.0, 0.0], "▁▁"), ([3.0], "█"), ([0.0, 1.0, 4.0], "▁▃█"), ([0.0, 2.0, 2.0, 4.0], "▁▅▅█")]
)
def test_bars_run_from_zero_to_the_largest(values: list[float], bars: str) -> None:
    assert report.sparkline(values) == bars


def test_bars_are_means_of_neighbours() -> None:
    assert report.sparkline([0.0, 2.0, 8.0, 8.0], 2) == "▂█"


def test_pictures_of_the_loggers_are_shown(tmp_path: Path) -> None:
    config = evolve(CONFIG, track_with=(Choice("silent"), Choice("drawing"), Choice("not installed")))
    assert report.write(tmp_path, config, History(), None) == "# lake: 9 steps\n\n![a.png](a.png)\n\n![b.png](b.png)\n"


def test_the_history_travels_through_json() -> None:
    history = History({0: evaluation(0.1, 0.2), 10: {"val/x": 1.0}}, {"random": {"val/x": 2.0}})
    history.note({"policy/loss": 0.5, "policy/entropy": 2.0})
    history.note({"policy/loss": 0.4})
    history.trained(3, [1e-6, 2e-6])
    assert (history.first, history.last) == (
        {"policy/loss": 0.5, "policy/entropy": 2.0},
        {"policy/loss": 0.4, "policy/entropy": 2.0},
    )
    assert History.from_plain(json.loads(json.dumps(history.to_plain()))) == history
    assert History.from_plain(History().to_plain()) == History()
    assert History.from_plain({"evaluations": {}, "baselines": {}, "last": {}}) == History()


@pytest.mark.parametrize(
    ("trainer", "sampler", "expected"),
    [
        (
            0.5,
            0.05,
            "trainer was idle for 50% of the time, the sampler for 5%. The trainer waits: more sampling engines",
        ),
        (
            0.0,
            0.3,
            "trainer was idle for 0% of the time, the sampler for 30%. The sampler waits: the trainer is the slower side",
        ),
        (0.05, 0.05, "the sampler for 5%."),
    ],
)
def test_the_report_says_which_side_waits(trainer: float, sampler: float, expected: str) -> None:
    last = {"time/step": 10.0, "time/trainer_idle": 10 * trainer, "time/sampler_idle": 10 * sampler}
    assert expected in report.who_waits(last)
    assert report.who_waits({}) == ""


def test_steps_after_which_nothing_is_played_say_nothing_of_who_waits(tmp_path: Path) -> None:
    history = History()
    for step, sampler in enumerate((0.0, 1.0, 10.0)):  # max_steps 3, ratio 1: beside the last one nothing plays
        values = {"time/step": 10.0, "time/trainer_idle": 5.0, "time/sampler_idle": sampler}
        history.note(values, ahead=step + 1 < 3)
    history.note({"val/x": 1.0}, ahead=True)
    assert history.waits == {"time/step": 20.0, "time/trainer_idle": 10.0, "time/sampler_idle": 1.0}
    text = report.write(tmp_path, CONFIG, History.from_plain(json.loads(json.dumps(history.to_plain()))), None)
    assert "the trainer was idle for 50% of the time, the sampler for 5%. The trainer waits" in text
