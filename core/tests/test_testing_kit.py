"""The conformance kit passes the fakes, and notices every broken implementation in the test that is about its fault."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.errors import PluginError
from turnwise.hookspecs import KINDS
from turnwise.plugins import registry, reset_registry
from turnwise.testing.kit import CONTRACTS, FAKES, run_conformance
from turnwise.testing.writes import writes

BROKEN = sorted(Path(__file__).with_name("broken").glob("*.py"))


@pytest.fixture(autouse=True)
def _registry_of_its_own() -> Iterator[None]:
    reset_registry()
    yield
    reset_registry()


def outcomes(output: str, outcome: str) -> dict[str, set[str]]:
    """Implementation → the contract tests with this outcome."""
    found: dict[str, set[str]] = defaultdict(set)
    for test, parameters in re.findall(rf"::(test_\w+)\[([^\]]+)\] {outcome}", output):
        found[parameters.split("-")[0]].add(test)
    return found


def test_every_kind_has_a_fake_and_a_contract_file() -> None:
    registry().declare([FAKES])
    for kind in KINDS.values():
        assert registry().find(kind, "fake").plugin == FAKES
        assert (CONTRACTS / f"{kind}.py").is_file()


def test_the_fakes_pass_strictly(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_conformance("fake", strict=True) == 0
    assert "failed" not in capfd.readouterr().out.splitlines()[-1]


UNUSUAL = """
import numpy as np
from turnwise import Implementation, hookimpl

class Bare:
    "No render, no close, and the generator that takes no seed of more than 32 bits."

    def reset(self, *, seed=None, options=None):
        self.draw = np.random.RandomState(seed)
        return f"begin at {self.draw.randint(1000)}", {}

    def step(self, action):
        return "go on", float(self.draw.randint(2)), bool(self.draw.randint(2)), False, {}

class OnePuzzle:
    "One task, whatever the seed."

    num_tasks = 1

    def reset(self, *, seed=None, options=None):
        assert options == {"index": 0}
        return "open the door", {}

    def step(self, action):
        return "it is open", 1.0, True, False, {"success": True}

@hookimpl
def environments():
    return [Implementation("bare", Bare), Implementation("one_puzzle", OnePuzzle)]
"""


def test_what_the_contract_leaves_open_passes_strictly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unusual.py").write_text(UNUSUAL, encoding="utf-8")
    code = run_conformance(str(tmp_path / "unusual.py"), strict=True)
    assert code == 0, capfd.readouterr().out


@pytest.fixture(scope="module")
def broken() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """What one run over all broken implementations gave (in a process of its own: they meddle with global state)."""
    code = "import sys; from turnwise.testing.kit import run_conformance; print(*map(run_conformance, sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *map(str, BROKEN)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [" ".join("1" for _ in BROKEN)], done.stdout + done.stderr
    return outcomes(done.stdout, "FAILED"), outcomes(done.stdout, "PASSED")


MUST_FAIL: dict[str, set[str]] = {
    "SeedsGlobally": {"test_the_process_global_random_state_is_left_untouched"},
    "DrawsGlobally": {
        "test_the_process_global_random_state_is_left_untouched",
        "test_same_seed_and_actions_give_the_same_trajectory",
    },
    "SeedsWhenItIsBuilt": {"test_the_process_global_random_state_is_left_untouched"},
    "DrawsGloballyNowAndThen": {"test_the_process_global_random_state_is_left_untouched"},
    "WritesIntoASharedTask": {"test_two_instances_do_not_disturb_each_other"},
    "RewardsHaste": {"test_the_time_has_no_influence"},
    "RewardsByTheDay": {"test_the_time_has_no_influence"},
    "TellsTheDate": {"test_the_time_has_no_influence"},
    "RejectsItsAnswer": {"test_its_own_answers_are_right"},
    "AnswersWithAList": {"test_info_holds_what_the_contract_names"},
    "SharesState": {"test_two_instances_do_not_disturb_each_other"},
    "IgnoresSeed": {"test_other_seeds_differ_somewhere"},
    "SeedsOf31Bits": {"test_the_largest_seed_is_taken"},
    "SeedsByHash": {"test_another_process_plays_the_same"},
    "OrdersBySet": {"test_another_process_plays_the_same"},
    "RemembersEpisodes": {"test_same_seed_and_actions_give_the_same_trajectory"},
    "HoldsALambda": {"test_it_pickles"},
    "RewardsNan": {"test_values_are_finite_and_of_the_types_of_the_contract"},
    "TellsLists": {"test_info_holds_what_the_contract_names"},
    "ClosesOnce": {"test_it_closes_twice"},
    "RaisesOnEmpty": {"test_an_empty_action_is_answered"},
    "NeedsTheResponse": {"test_an_environment_that_takes_the_response_plays_with_and_without_it"},
    "RendersFloats": {"test_it_renders"},
    "LeaksOutsideTheMask": {"test_nothing_stands_outside_the_mask"},
    "CountsRows": {"test_the_rows_do_not_matter"},
    "ReadsGroupNumbers": {"test_the_numbers_of_the_groups_do_not_matter"},
    "ReadsWhatWasFiltered": {"test_what_a_filter_dropped_has_no_influence"},
    "TrainsWhatWasFiltered": {"test_what_a_filter_dropped_has_no_influence"},
    "MixesRoles": {"test_the_members_of_another_role_are_another_group"},
    "DividesByTheSpread": {"test_groups_of_one_and_groups_without_variance_are_finite"},
    "WritesIntoTheBatch": {"test_it_is_deterministic_and_leaves_the_batch_as_it_was"},
    "SinglePrecision": {"test_shapes_and_types"},
    "InventsARow": {"test_it_invents_nothing"},
    "Miscounts": {"test_updates_says_how_many_plan_makes"},
    "ShufflesGlobally": {"test_it_is_deterministic_under_the_seed_alone"},
    "KeepsNumbers": {"test_it_gives_one_bool_per_trajectory"},
    "RefusesNan": {"test_numbers_of_every_kind_and_new_names_are_logged"},
    "WritesWhereItStands": {"test_it_stays_in_its_own_files"},
    "EmptiesTheFolder": {"test_it_stays_in_its_own_files"},
    "WritesBesideTheRun": {"test_it_stays_in_its_own_files"},
    "NeverResumes": {"test_it_forgets_what_is_played_again"},
    "ResumesAStepLate": {"test_it_forgets_what_is_played_again"},
    "ResumesItsNumbersAlone": {"test_it_forgets_what_is_played_again"},
    "ForgetsEverything": {"test_it_forgets_what_is_played_again"},
    "OnlyAddsAndForgets": {"test_it_forgets_what_is_played_again"},
    "NeverResumesInSecret": {"test_it_forgets_what_is_played_again"},
    "MeanLoss": {"test_shape_and_metrics"},
    "MetricWithGradient": {"test_shape_and_metrics"},
    "UsesTheEntropy": {"test_gradient_flows_through_the_new_log_probs_alone"},
    "WeighsByPosition": {"test_the_order_of_the_samples_does_not_matter"},
    "Explodes": {"test_it_is_finite_at_extremes"},
    "CentresOverTheView": {"test_the_other_samples_of_the_view_do_not_matter"},
    "DropsTheFirstToken": {"test_every_token_is_pushed_where_its_advantage_says"},
    "FlipsTheSign": {"test_every_token_is_pushed_where_its_advantage_says"},
    "DeniesItsRatio": {"test_what_it_declares_of_the_ratio_is_true"},
    "ClaimsARatio": {"test_what_it_declares_of_the_ratio_is_true"},
    "TakesItsOwnRatio": {"test_what_it_declares_of_the_ratio_is_true"},
    "NeedsTheReference": {"test_it_needs_no_column_that_it_does_not_declare"},
    "IgnoresTheTemperature": {"test_log_probs_are_those_of_the_reference"},
    "KeepsItsVersion": {"test_a_weight_update_is_seen_in_the_versions"},
    "CountsRequests": {"test_one_seed_gives_one_answer_alone_or_among_others"},
    "StampsTheNewest": {"test_weights_that_come_between_two_tokens_sample_the_rest"},
    "NeverPauses": {"test_a_paused_backend_keeps_requests_until_it_resumes"},
    "ColdStrategy": {"test_log_probs_are_those_of_the_reference"},
    "AveragesMicroBatches": {"test_micro_batches_do_not_change_the_gradient"},
    "GoesUphill": {"test_an_update_raises_what_has_a_positive_advantage"},
    "ForgetsTheWeights": {"test_load_undoes_what_came_after_save"},
    "EncodesAgain": {"test_sampled_tokens_and_their_log_probs_travel_untouched"},
    "Swallows": {"test_a_failing_environment_is_not_swallowed"},
    "MarksPrompts": {"test_samples_hold_every_sampled_token_once"},
    "RepeatsRows": {"test_rows_and_calls_are_as_many_as_the_manager_declares"},
    "AsksTwice": {"test_rows_and_calls_are_as_many_as_the_manager_declares"},
    "MisplacesLogProbs": {"test_samples_hold_every_sampled_token_once"},
    "MixesVersions": {"test_samples_hold_every_sampled_token_once"},
    "ZeroesRewards": {"test_rewards_belong_to_the_step_that_earned_them"},
    "PaysATurnLate": {"test_rewards_belong_to_the_step_that_earned_them"},
    "AnchorsAfterTheStep": {"test_a_turn_tells_the_state_before_its_call"},
    "TellsTheNextObservation": {"test_a_turn_tells_the_state_before_its_call"},
    "CallsTruncatedTerminated": {"test_the_trajectories_tell_who_they_are_and_how_they_ended"},
    "AlwaysSucceeds": {"test_the_trajectories_tell_who_they_are_and_how_they_ended"},
    "SilentRuntime": {"test_the_exception_of_a_role_arrives_where_it_was_called"},
    "UnwatchedRuntime": {"test_the_watch_of_a_living_role_does_not_end"},
    "PartialRuntime": {"test_a_placed_strategy_has_every_method_of_a_training_role"},
    "AbsentWorkers": {"test_episodes_have_an_executor_or_none"},
    "OpenSource": {"test_the_continuation_equals_the_whole_dialogue_rendered"},
}
NEEDS_TORCH = {
    *("MeanLoss", "MetricWithGradient", "UsesTheEntropy", "WeighsByPosition", "Explodes", "CentresOverTheView"),
    *("DropsTheFirstToken", "FlipsTheSign", "DeniesItsRatio", "ClaimsARatio", "TakesItsOwnRatio", "NeedsTheReference"),
}


@pytest.mark.parametrize("name", MUST_FAIL)
def test_a_broken_implementation_is_noticed(name: str, broken: tuple[dict[str, set[str]], dict[str, set[str]]]) -> None:
    if name in NEEDS_TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip("policy losses are tested with torch")
    failed, passed = broken
    assert MUST_FAIL[name] <= failed[name]
    assert passed[name], "everything fails: the fault is not the one that is meant"


def test_without_fixtures_a_test_is_skipped_with_the_reason_and_strict_fails_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from turnwise import Implementation, hookimpl\n@hookimpl\ndef train_strategies():\n    return"
        " [Implementation('mine', 'turnwise.testing.fakes:FakeStrategy')]\n@hookimpl\ndef environments():\n    return"
        " [Implementation('needs_options', Needs), Implementation('absent', Needs,"
        " requires=('no_such_package',))]\nclass Needs:\n    def __init__(self, size): pass\n",
        encoding="utf-8",
    )
    assert run_conformance(str(plugin)) == 0
    output = capfd.readouterr().out
    assert "has no fixture 'context'" in output
    assert "needs the option size" in output
    assert "needs no_such_package, not installed" in output
    assert run_conformance("mine", strict=True) == 1
    assert "--strict: " in capfd.readouterr().out


def test_a_kind_narrows_the_choice(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_conformance("fake", kind="group_filter") == 0
    assert set(outcomes(capfd.readouterr().out, "PASSED")) == {"fake_filter"}


def test_unknown_names_and_kinds_are_told_in_one_line() -> None:
    with pytest.raises(PluginError, match=r"nothing is named 'fake_envv'\. Did you mean 'fake_env'\? Installed: "):
        run_conformance("fake_envv")
    with pytest.raises(PluginError, match=r"there is no kind 'environments'\. Did you mean 'environment'\? Kinds: "):
        run_conformance("fake", kind="environments")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="does not exist"):
        run_conformance(str(tmp_path / "nothing.py"))


def test_what_is_written_is_seen_after_a_watch_inside_another_has_ended(tmp_path: Path) -> None:
    with writes() as outer:
        with writes() as inner:
            pass
        (tmp_path / "late").write_text("")
    assert outer == {tmp_path / "late"}
    assert not inner


def test_fakes_and_kit_load_no_torch() -> None:
    modules = "turnwise.testing.fakes, turnwise.testing.fixtures, turnwise.testing.synthetic"
    code = f"import sys, {modules}; print('torch' in sys.modules, 'pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
