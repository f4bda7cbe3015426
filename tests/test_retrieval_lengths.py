"""The regression run for lengths: on long documents no sample is longer than max_prompt_length + max_new_tokens,
whatever the manager."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BOUND, PROMPT, STEP = 4596, 4096, 16


MANAGERS = {"apart": "{use: stepwise}", "merged": "{use: stepwise, merge_steps: true}", "trajectory": "trajectory"}


@pytest.fixture(scope="module")
def steps(make_run: Any) -> dict[str, dict[str, Any]]:
    """The metrics of the example's first step with each manager."""
    text = (ROOT / "examples" / "retrieval.yaml").read_text(encoding="utf-8")
    assert MANAGERS["merged"] in text
    found = {}
    for name, manager in MANAGERS.items():
        run = make_run(text.replace(MANAGERS["merged"], manager))
        run.train("output_dir=out", "track_with=[{use: jsonl, every: 1}]", "max_steps=1")
        found[name] = run.metrics()[0]
    return found


@pytest.mark.parametrize("manager", MANAGERS)
def test_every_sample_keeps_the_bound_where_episodes_run_into_it(
    steps: dict[str, dict[str, Any]], manager: str
) -> None:
    line = steps[manager]
    assert 2000 < line["tokens/batch_padded_seq_len"] <= BOUND
    assert line["rollout/stop/length"] > 0  # documents of up to 5,000 tokens do not fit
    assert line["tokens/total"] <= line["rollout/samples"] * BOUND
    if manager == "apart":
        assert line["tokens/response_length/max"] <= STEP  # responses hold no observation
        assert line["tokens/prompt_length/max"] <= PROMPT
        assert line["rollout/samples"] == line["rollout/turns"]


def test_merging_saves_tokens_on_the_same_episodes_and_leaves_the_gradient(steps: dict[str, dict[str, Any]]) -> None:
    apart, merged = steps["apart"], steps["merged"]
    for name in ("rollout/turns", "rollout/sampled_tokens", "tokens/sampled", "critic/score/mean"):
        assert apart[name] == merged[name]
    assert merged["rollout/samples"] < apart["rollout/samples"]
    assert merged["tokens/total"] < apart["tokens/total"]
    assert merged["policy/grad_norm"] == pytest.approx(apart["policy/grad_norm"], rel=1e-4)


def test_the_benchmark_prints_its_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("samples", ROOT / "benchmarks" / "samples.py")
    assert spec is not None
    assert spec.loader is not None
    samples = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "samples", samples)
    spec.loader.exec_module(samples)
    monkeypatch.setattr(
        "sys.argv", ["samples.py", "--episodes", "2", "--longest", "150", "--hops", "2", "--repeats", "1"]
    )
    samples.main()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    keeps = {row[0]: row for row in rows[2:6]}
    assert [row[1] for row in rows[2:6]] == ["2", "6", "2", "6"]
    assert keeps["step-wise, merged"][2:5] == keeps["trajectory-wise"][2:5]
    assert len({keeps[name][6] for name in ("trajectory-wise", "step-wise", "step-wise, merged")}) == 1
    assert [row[1] for row in rows[8:12]] == [
        "2",
        "6",
        "6",
        "6",
    ]  # nothing merges where every earlier turn loses its thinking
