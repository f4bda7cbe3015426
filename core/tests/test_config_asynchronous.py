"""The keys of asynchronous training: what they take, what they switch on, and what cannot stand beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.config import Loaded, load
from turnwise.config.schema import TrainInferCorrection
from turnwise.contracts.inference import BackendCapabilities
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.errors import ConfigError
from turnwise.testing.fakes import FakeBackend, FakeRuntime

Run = Callable[..., Loaded]
Toy = Callable[..., Path]
AHEAD = "async_generation_ratio=1"
OFF = TrainInferCorrection()


@pytest.mark.parametrize("place", ["file", "override"])
@pytest.mark.parametrize(
    ("written", "read", "float_"),
    [("0", 0, ""), ("2", 2, ""), ("0.0", 0, "0.0"), ("1.0", 1, "1.0"), ("1e0", 1, "1.0"), ("-0.0", 0, "-0.0")],
)
def test_a_whole_number_is_taken_also_as_a_float_with_a_note(
    run_yaml: Run, base_yaml: str, place: str, written: str, read: int, float_: str
) -> None:
    line = f"async_generation_ratio: {written}\n"
    loaded = run_yaml(line) if place == "file" else run_yaml("", f"async_generation_ratio={written}")
    assert loaded.config.async_generation_ratio == read
    assert type(loaded.config.async_generation_ratio) is int
    notes = [note for note in loaded.notes if "$.async_generation_ratio: " in note and " is " in note]
    lines = base_yaml.count("\n") + 1
    where = f"run.yaml:{lines}" if place == "file" else f"override 'async_generation_ratio={written}'"
    assert notes == (
        [f"{where}: $.async_generation_ratio: {float_} is {read} here (a number of batches)"] if float_ else []
    )


@pytest.mark.parametrize("place", ["file", "override"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *(("0.5", "0.5"), ("1.5", "1.5"), ("-1", "-1"), ("-1.0", "-1"), ("-0.5", "-0.5"), ("1e-1", "0.1")),
        *(("'1'", "'1'"), ("'1.0'", "'1.0'"), ("one", "'one'"), ("true", "True"), ("false", "False")),
        *(("null", "None"), ("~", "None"), (".inf", "inf"), (".nan", "nan"), ("[1]", "[1]"), ("{a: 1}", "{'a': 1}")),
    ],
)
def test_what_is_no_number_of_batches_is_refused_with_the_range(
    run_yaml: Run, place: str, value: str, shown: str
) -> None:
    written = [f"async_generation_ratio: {value}\n"] if place == "file" else ["", f"async_generation_ratio={value}"]
    with pytest.raises(ConfigError) as caught:
        run_yaml(*written)
    (line,) = caught.value.problems
    assert f"$.async_generation_ratio: {shown}: async_generation_ratio must be" in line
    assert "at least 0" in line
    assert ". Fix: " in line


def test_a_correction_by_weights_is_on_unless_the_file_decides(run_yaml: Run) -> None:
    loaded = run_yaml("", AHEAD)
    assert loaded.config.train_infer_correction is not None
    weight = loaded.config.train_infer_correction.is_weight
    assert (weight.enabled, weight.weight_type, weight.lower_bound, weight.upper_bound) == (True, "token", 0.0, 2.0)
    assert any("$.async_generation_ratio: 1 switches train_infer_correction.is_weight on" in n for n in loaded.notes)
    assert run_yaml("").config.train_infer_correction is None


def test_a_correction_that_is_written_stands_as_it_is(run_yaml: Run) -> None:
    loaded = run_yaml("", AHEAD, "train_infer_correction={is_weight: {enabled: true, upper_bound: 5}}")
    assert loaded.config.train_infer_correction is not None
    assert loaded.config.train_infer_correction.is_weight.upper_bound == 5
    assert not [n for n in loaded.notes + loaded.warnings if "train_infer_correction" in n]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("null", "$.train_infer_correction: null beside async_generation_ratio 1: nothing corrects for the age"),
        (
            "{is_weight: {enabled: false}}",
            "$.train_infer_correction.is_weight.enabled: false beside async_generation_ratio 1",
        ),
    ],
)
def test_a_correction_that_is_switched_off_stays_off_with_a_warning(run_yaml: Run, written: str, expected: str) -> None:
    loaded = run_yaml("", AHEAD, f"train_infer_correction={written}")
    assert (loaded.config.train_infer_correction or OFF).is_weight.enabled is False
    assert any(expected in warning for warning in loaded.warnings)


def test_a_bound_alone_is_that_of_the_weights(run_yaml: Run) -> None:
    loaded = run_yaml("", AHEAD, "train_infer_correction.is_weight.upper_bound=5")
    assert loaded.config.train_infer_correction is not None
    assert loaded.config.train_infer_correction.is_weight.enabled
    assert loaded.config.train_infer_correction.is_weight.upper_bound == 5


def test_filters_alone_get_the_weights_beside_them(run_yaml: Run) -> None:
    loaded = run_yaml("", AHEAD, "train_infer_correction={filters: [{ratio_enabled: true}]}")
    assert loaded.config.train_infer_correction is not None
    assert loaded.config.train_infer_correction.is_weight.enabled
    assert len(loaded.config.train_infer_correction.filters) == 1


def test_a_loss_with_a_ratio_to_the_sampler_gets_no_weights(run_yaml: Run) -> None:
    loaded = run_yaml("", AHEAD, "pg_variant=dppo")
    assert loaded.config.train_infer_correction is None
    assert not [line for line in loaded.notes + loaded.warnings if "train_infer_correction" in line]


@pytest.mark.parametrize(
    "written", ["recompute_old_logprobs=false", "recompute_old_logprobs='false'", "enable_old_logprobs_recompute=false"]
)
@pytest.mark.parametrize("correction", ["{}", "null", "{is_weight: {enabled: true}}"])
def test_old_log_probs_of_the_sampler_are_refused(run_yaml: Run, written: str, correction: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_yaml("", AHEAD, written, f"train_infer_correction={correction}")
    line = next(one for one in error.value.problems if "async_generation_ratio" in one)
    # The key that was written is named, translated or not.
    assert f"$.{written.partition('=')[0]}: false beside async_generation_ratio 1" in line


def test_a_way_of_updating_has_no_effect_where_nothing_is_ahead(run_yaml: Run) -> None:
    loaded = run_yaml("", "weight_update=between_turns")
    assert any("$.weight_update: has no effect: async_generation_ratio is 0" in warning for warning in loaded.warnings)


def test_the_timeout_of_all_is_above_those_of_the_calls(run_yaml: Run) -> None:
    assert run_yaml("").config.stall_timeout == 900
    assert run_yaml("", "actor_infer.request_timeout=2000").config.stall_timeout == 3000
    with pytest.raises(ConfigError, match=r"\$\.stall_timeout: 500 is not above actor_infer.request_timeout 600"):
        run_yaml("", "stall_timeout=500")


@pytest.mark.parametrize("when", ["between_turns", "between_tokens"])
def test_episodes_are_cut_on_every_runtime(toy: Toy, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    path = toy(async_generation_ratio=1, weight_update=when, runtime="fake_runtime")
    assert load(path).config.weight_update == when
    monkeypatch.setattr(FakeRuntime, "capabilities", RuntimeCapabilities())
    assert load(path).config.weight_update == when


def test_responses_are_cut_by_a_backend_that_says_so_alone(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toy(async_generation_ratio=1, weight_update="between_tokens")
    assert load(path).config.weight_update == "between_tokens"
    monkeypatch.setattr(FakeBackend, "capabilities", BackendCapabilities())
    with pytest.raises(ConfigError, match=r"\$\.weight_update: between_tokens is not there for the backend 'fake"):
        load(path)
    load(toy(async_generation_ratio=1, weight_update="between_turns"))
