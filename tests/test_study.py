"""The study of what learns: its configurations are valid, a finished run is not run again, a failed one stops nobody,
its numbers are right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from attrs import evolve

from turnwise.config import load

ROOT = Path(__file__).resolve().parent.parent
COMBINATIONS = 3 * 4 + 2 * 2


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/study_runs.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("study_runs")


@pytest.fixture
def pages(study: Any) -> Any:
    """benchmarks/study_pages.py."""
    return importlib.import_module("study_pages")


def line_of(run: Any, after: float = 0.75, **more: Any) -> dict[str, Any]:
    """What a finished run of two steps of 8 trajectories may have left."""
    used = {
        "steps": 2,
        "trajectories": 16.0,
        "turns": 64.0,
        "samples": 32.0,
        "tokens": 2e6,
        "sampled_tokens": 99.0,
        "cpu": 7.4,
        "wall": 9.0,
    }
    shown = {"evals": [[0, 0.0, -1.8], [2, after, 0.5]], "training": [0.1, 0.3], "last_turns": 4.0, "last_samples": 2.0}
    return {**run.keys, **used, **shown, "players": {"random": 0.25}, "machine": "two cores", **more}


def test_there_is_a_run_for_every_combination_and_seed_and_a_study_cut_short_has_whole_tables(study: Any) -> None:
    runs = study.all_runs()
    assert len({run.name for run in runs}) == len(runs) == 3 * 12 + 4
    lake = {
        (m, e) for m in ("trajectory", "stepwise", "merged") for e in ("grpo", "gigpo", "gae", "reinforce_plus_plus")
    }
    for seed, first in ((0, 0), (1, COMBINATIONS), (2, COMBINATIONS + 12)):
        part = runs[first : first + 12]
        assert {(run.env, run.seed) for run in part} == {("frozen_lake", seed)}
        assert {(run.manager, run.estimator) for run in part} == lake
    assert [run.env for run in runs[12:COMBINATIONS]] == ["sokoban"] * 4


def test_every_configuration_is_valid_and_the_budget_is_the_same_for_all(study: Any, tmp_path: Path) -> None:
    budgets = set()
    for run in study.all_runs([0]):
        file = tmp_path / f"{run.name}.yaml"
        file.write_text(yaml.safe_dump(run.config), encoding="utf-8")
        config = load(file).config
        budgets.add((run.env, config.max_steps * config.rollout_batch_size))
        for env in config.custom_envs.values():
            assert env.env_manager.name == ("trajectory" if run.manager == "trajectory" else "stepwise")
        assert config.adv_estimator.name == run.estimator
    assert len(budgets) == 2


def test_seeds_change_nothing_but_the_seed_and_the_players(study: Any) -> None:
    first, second = study.frozen_lake("stepwise", "grpo", 0).config, study.frozen_lake("stepwise", "grpo", 1).config
    assert {name for name in first if first[name] != second[name]} == {"seed", "baselines"}


@pytest.fixture
def small(study: Any) -> Any:
    """One step of a few short episodes, merged samples and a critic."""
    run = study.frozen_lake("merged", "gae", 0, steps=1)
    run.config["rollout_batch_size"] = run.config["val_batch_size"] = 8
    run.config["train_env_manager"] |= {"num_env_groups": 2, "group_size": 4}
    run.config["val_env_manager"]["num_env_groups"] = 8
    run.config["pretrain"]["recipe"] |= {"hidden_size": 16, "num_layers": 1}
    for role in ("actor_train", "critic"):
        run.config[role]["training_args"] |= {"per_device_train_batch_size": 8, "warmup_steps": 0}
    return run


@pytest.mark.slow
def test_a_run_leaves_a_line_and_is_not_run_again_and_a_broken_one_stops_nobody(
    study: Any, small: Any, tmp_path: Path
) -> None:
    broken = evolve(small, seed=1, config={**small.config, "max_steps": -1})
    outcomes = list(study.play_all([broken, small], tmp_path))
    assert outcomes[0] == (broken, None)
    assert "max_steps" in (tmp_path / f"{broken.name}.log").read_text(encoding="utf-8")
    line = outcomes[1][1]
    assert (line["steps"], line["trajectories"], line["failed"]) == (1, 8, 0)
    assert [step for step, *_ in line["evals"]] == [0, 1]
    assert 8 <= line["samples"] <= line["turns"]
    assert line["cpu"] > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "play", lambda *_: pytest.fail("a finished run was run again"))
        assert list(study.play_all([small], tmp_path)) == [(small, json.loads(json.dumps(line)))]


def test_a_line_that_a_kill_cut_short_and_a_changed_configuration_are_not_finished(study: Any, tmp_path: Path) -> None:
    run = study.frozen_lake("stepwise", "grpo", 0)
    other = evolve(run, seed=1)
    (tmp_path / "results.jsonl").write_text(
        json.dumps(line_of(run)) + "\n" + json.dumps(line_of(other))[:40], encoding="utf-8"
    )
    assert list(study.finished(tmp_path)) == [(run.name, run.digest)]
    assert study.frozen_lake("stepwise", "grpo", 0, steps=7).digest != run.digest


def test_standard_errors_of_two_proportions(pages: Any) -> None:
    assert pages.errors_above(0.5, 0.25, 512) == pytest.approx(0.25 / ((0.25 + 0.1875) / 512) ** 0.5)
    assert pages.errors_above(0.25, 0.5, 512) == -pages.errors_above(0.5, 0.25, 512)
    assert pages.errors_above(0.0, 0.0) == 0.0
    assert pages.errors_above(1.0, 0.0) == float("inf")


def test_the_pages_show_every_run_also_those_that_did_not_learn(study: Any, pages: Any, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "learning.md"
    page.parent.mkdir()
    marks = [pages.BEGIN.format(env) + "old\n" + pages.END.format(env) for env in ("frozen_lake", "sokoban")]
    page.write_text("before\n" + "between\n".join(marks) + "after\n", encoding="utf-8")
    after = {0: 0.75, 1: 0.25, 2: 0.5}
    lines = [
        line_of(run, after[run.seed])
        for run in study.all_runs()
        if (run.env, run.estimator, run.seed) != ("frozen_lake", "gae", 2)
    ]
    pages.write(lines, tmp_path / "results", page.parent / "images")
    text = page.read_text(encoding="utf-8")
    assert "| stepwise, merged | `gigpo` | 0.750 | 0.250 | 0.500 | 0.500 | 0.000 | 2 of 3 |" in text
    assert "| trajectory | `gae` | 0.750 | 0.250 | – | 0.500 | 0.000 | 1 of 2 |" in text
    assert "| trajectory | `gigpo` | 0 | 0.000 | 0.750 |" in text
    assert "old" not in text
    assert [word for word in ("before", "between", "after") if word in text] == ["before", "between", "after"]
    lake = (tmp_path / "results" / "study.md").read_text(encoding="utf-8")
    assert lake.count("| `grpo` |") == 9  # success, what was used, and how soon
    assert "| trajectory | `grpo` | never | never | never |" in lake
    assert {path.name for path in (page.parent / "images").iterdir()} == {"study.png", "study_gigpo.png"}
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="has no lines"):
        pages.write(lines, tmp_path / "results", page.parent / "images")


def test_how_soon_success_in_training_came(study: Any, pages: Any) -> None:
    run = study.frozen_lake("stepwise", "gigpo", 0)
    line = line_of(run, training=[0.0, 1.0, 0.2, 0.8, 0.5], steps=5, trajectories=40.0)  # means 0, .5, .4, .5, .5
    assert pages.reached({("stepwise", "gigpo"): [line]}, [0, 1])[2:] == ["| stepwise | `gigpo` | 16 | – |"]


def test_runs_of_different_budgets_make_no_table(study: Any, pages: Any) -> None:
    first, second = (study.frozen_lake("stepwise", "grpo", seed) for seed in (0, 1))
    with pytest.raises(ValueError, match="differ in trajectories"):
        pages.lake_tables([line_of(first), line_of(second, trajectories=17.0)])


def test_the_committed_tables_are_on_the_page(pages: Any) -> None:
    page = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
    for name, _ in pages.PAGES.values():
        rows = [
            line
            for line in (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8").splitlines()
            if line.startswith("|")
        ]
        assert len(rows) > 4
        assert [row for row in rows if row not in page] == []
