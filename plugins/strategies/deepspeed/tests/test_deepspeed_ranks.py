"""Two processes: parity with plain torch in one process, resume in new processes, every loss and aggregation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from deepspeed_cases import (
    COUNTS,
    FORMS,
    context,
    five_updates,
    furthest,
    make_picture_rows,
    make_rows,
    run_cases,
    run_updates,
    zero,
)
from transformers import AutoModelForCausalLM

from turnwise.contracts.train import Lora, LossChoice, Objective
from turnwise.data.dealing import deal, gather, merge_results
from turnwise.data.rows import Update
from turnwise.errors import CheckpointError
from turnwise.pipeline.aggregation import MODES, token_coefficients
from turnwise.plugins import registry
from turnwise_torch import lora
from turnwise_torch.fixtures import tiny_vision_model
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.testing import weights_of

pytest.importorskip("deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

LOSSES = sorted(entry.name for entry in registry().entries("policy_loss") if entry.plugin == "losses")
AT_STAGE_3 = ("tied", "untied")
ADAPTERS = {"lora": Lora(rank=4, alpha=8, target=("q_proj", "down_proj")), "seed": 3}
ALONE = {"lora": Lora(rank=4, alpha=8, target=("q_proj", "down_proj"), sync="adapter"), "seed": 3, "bucket_bytes": 2000}
SAVED = {"1": "fp32", "2": "bf16", "2 optimizer": "fp32", "3": "bf16", "3 optimizer param": "bf16"}
"""Forms whose state is saved, and their dtype. Stage 3 comes last, for it leaves another kernel for linear layers in its process."""
LATER = [Update(make_rows(20 + i, n), lr=5e-4) for i, n in enumerate((3, 8))]
"""Updates after a checkpoint."""


def aggregated(mode: str) -> Update:
    """An update without a step, its coefficients those of an aggregation mode."""
    rows = make_rows(7, 9)
    columns = rows.columns
    _, first, counts = np.unique(columns["sample"], return_index=True, return_counts=True)
    per_row = token_coefficients(
        mode,
        "trajectory",
        np.arange(len(rows)),
        columns["trajectory"][first],
        columns["weight"][first],
        counts,
        scale=30.0,
    )
    return Update(
        evolve(rows, columns={**columns, "coef": np.repeat(per_row, counts)}), lr=0.0, entropy_coef=0.01, kl_coef=0.1
    )


def objectives(name: str) -> dict[str, Objective]:
    """A loss by both ratios."""
    choice = LossChoice(name, registry().find("policy_loss", name).config_class()())
    return {"token": Objective(choice), "segment": Objective(choice, ratio_type="segment")}


def losses_case(folder: Path, name: str) -> dict[str, Any]:
    modes = [aggregated(mode) for mode in MODES]
    given = objectives(name)
    return {
        "model": folder,
        "config": zero(3),
        "context": {"objective": given["token"], "max_grad_norm": 0.0},
        "updates": modes,
        "objectives": given,
        "weights": False,
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def pictures(shared: Path) -> Path:
    return tiny_vision_model(shared / "model")


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], pictures: Path, shared: Path) -> list[dict[str, Any]]:
    """Every case in one pair of processes."""
    folder = folders["tied"]
    cases: dict[str, Any] = {}
    for name, dtype in SAVED.items():
        cases[f"saved {name}"] = {
            "model": folder,
            "config": FORMS[name],
            "context": {"dtype": dtype},
            "updates": LATER,
            "save": shared / f"state-{name}",
        }
    cases |= {
        f"form {name}": {"model": folder, "config": config, "updates": five_updates()} for name, config in FORMS.items()
    }
    for model in AT_STAGE_3:
        cases[f"whole {model}"] = {
            "model": folders[model],
            "config": zero(3),
            "context": {"gradient_checkpointing": True, "temperature": 0.7},
            "updates": five_updates(),
            "log_probs": make_rows(9, 3),
            "received": True,
            "export": shared / f"export-{model}",
        }
    cases["reference"] = {
        "model": folder,
        "config": zero(3),
        "context": {"trainable": False, "objective": None, "role": "reference"},
        "log_probs": make_rows(9, 1),
    }
    cases["critic"] = {
        "model": folder,
        "config": zero(3),
        "context": {"head": "value", "role": "critic", "objective": Objective(LossChoice("ppo"), value_clip=0.2)},
        "updates": five_updates(),
        "log_probs": make_rows(9, 3),
        "export": shared / "export-critic",
    }
    cases["adapters"] = {
        "model": folder,
        "config": zero(3),
        "context": ADAPTERS,
        "updates": five_updates(),
        "export": shared / "export-adapters",
    }
    cases["adapters alone"] = {
        "model": folder,
        "config": zero(3),
        "context": ALONE,
        "updates": five_updates()[:2],
        "alone": True,
    }
    shown = [Update(make_picture_rows(pictures, (True, False), i), lr=1e-3) for i in range(2)]
    cases["pictures"] = {
        "model": pictures,
        "config": zero(3),
        "context": {"objective": Objective(LossChoice("vanilla"))},
        "updates": shown,
    }
    cases |= {
        f"skipped {name}": {"model": folder, "config": FORMS[name], "updates": [five_updates()[0]] * 2, "broken": True}
        for name in FORMS
    }
    cases |= {f"loss {name}": losses_case(folder, name) for name in LOSSES}
    return run_cases(cases, shared / "pair")


def results_of(pair: list[dict[str, Any]], name: str, what: str = "results") -> list[Any]:
    """The ranks' reports put together, as the runtime does."""
    both = [rank[name][what] for rank in pair]
    assert [r.grad_norm for r in both[0]] == [r.grad_norm for r in both[1]], "the ranks disagree on the norm"
    return [merge_results(pieces) for pieces in zip(*both, strict=True)]


def same(reports: list[Any], expected: list[Any]) -> None:
    for one, other in zip(reports, expected, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
        assert set(one.sums) == set(other.sums)
        for metric, (x, w) in one.sums.items():
            assert (x, w) == pytest.approx(other.sums[metric], rel=1e-4, abs=1e-5), metric


@pytest.mark.parametrize("form", FORMS)
def test_no_rank_makes_a_step_where_one_has_a_loss_that_is_not_finite(
    pair: list[dict[str, Any]], plain: Callable[..., Any], form: str
) -> None:
    """The update after it is the first of plain torch."""
    for rank in pair:
        broken, sound = rank[f"skipped {form}"]["results"]
        assert (broken.skipped, sound.skipped) == (True, False)
        assert sound.grad_norm == pytest.approx(plain()[0][0].grad_norm, rel=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_five_updates_of_two_ranks_are_those_of_plain_torch(
    pair: list[dict[str, Any]], plain: Callable[..., Any], form: str
) -> None:
    expected, weights = plain()
    assert min(r.grad_norm for r in expected) > 0.1, "nothing was clipped"
    same(results_of(pair, f"form {form}"), expected)
    for rank in pair:
        assert furthest(rank[f"form {form}"]["weights"], weights) <= 1e-5


@pytest.mark.parametrize("model", AT_STAGE_3)
def test_stage_3_holds_half_of_every_parameter_and_gathers_nothing_between_updates(
    pair: list[dict[str, Any]], model: str
) -> None:
    for rank in pair:
        reported = rank[f"whole {model}"]
        assert all(held == -(-whole // 2) for held, whole in reported["held"])
        assert reported["gathered"] == 0


@pytest.mark.parametrize("model", AT_STAGE_3)
def test_the_head_is_gathered_tied_or_not_with_checkpointed_layers(
    pair: list[dict[str, Any]], plain: Callable[..., Any], model: str
) -> None:
    expected, weights = plain(model, gradient_checkpointing=True, temperature=0.7)
    same(results_of(pair, f"whole {model}"), expected)
    assert furthest(pair[0][f"whole {model}"]["weights"], weights) <= 1e-5


@pytest.mark.parametrize("model", AT_STAGE_3)
def test_a_backend_receives_whole_tensors_under_every_name(
    pair: list[dict[str, Any]], model: str, shared: Path
) -> None:
    reported = pair[0][f"whole {model}"]
    loaded = AutoModelForCausalLM.from_pretrained(shared / f"export-{model}", dtype=torch.float32).state_dict()
    assert "lm_head.weight" in reported["received"]
    for name, tensor in loaded.items():
        assert torch.equal(tensor, reported["received"][name]), name
        assert torch.equal(tensor, reported["weights"][name]), name
    assert set(reported["received"]) == set(loaded)
    assert pair[1][f"whole {model}"]["received"] == {}


def test_log_probs_of_dealt_rows_are_those_of_the_exported_model(pair: list[dict[str, Any]], shared: Path) -> None:
    rows = make_rows(9, 3)
    got = gather(rows, deal(rows, 2), [rank["whole tied"]["log_probs"] for rank in pair])
    expected = TorchStrategy(None, context(shared / "export-tied", temperature=0.7)).logprobs(rows)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_a_sharded_reference_answers_for_its_rows_and_for_none(pair: list[dict[str, Any]], folder: Path) -> None:
    expected = TorchStrategy(None, context(folder, trainable=False, objective=None)).logprobs(make_rows(9, 1))
    answers = [rank["reference"]["log_probs"] for rank in pair]
    np.testing.assert_allclose(np.concatenate(answers), expected, rtol=0, atol=2e-5)
    assert sorted(len(answer) for answer in answers) == [0, len(expected)]
    assert all(held < whole for held, whole in pair[0]["reference"]["held"])


def test_a_sharded_critic_is_the_one_of_plain_torch_and_is_exported_with_its_head(
    pair: list[dict[str, Any]], plain: Callable[..., Any], shared: Path
) -> None:
    options = {"head": "value", "role": "critic", "objective": Objective(LossChoice("ppo"), value_clip=0.2)}
    same(results_of(pair, "critic"), plain(**options)[0])
    rows = make_rows(9, 3)
    values = gather(rows, deal(rows, 2), [rank["critic"]["log_probs"] for rank in pair])
    exported = TorchStrategy(None, context(shared / "export-critic", **options)).values(rows)
    assert np.abs(values).max() > 1e-3
    np.testing.assert_allclose(values, exported, rtol=0, atol=1e-5)


def test_sharded_adapters_are_those_of_plain_torch(
    pair: list[dict[str, Any]], plain: Callable[..., Any], shared: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed (pip install 'turnwise-torch[lora]')")
    expected, weights = plain(**ADAPTERS)
    same(results_of(pair, "adapters"), expected)
    assert furthest(pair[0]["adapters"]["weights"], weights) <= 1e-5
    assert (shared / "export-adapters" / "adapter" / "adapter_model.safetensors").is_file()


def test_adapters_alone_are_gathered_for_every_transport(pair: list[dict[str, Any]], folder: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (pip install 'turnwise-torch[lora]')")
    strategy = TorchStrategy(None, context(folder, **ALONE))
    run_updates(strategy, five_updates()[:2])
    expected = lora.adapter_tensors(strategy.model, lambda tensor: tensor)
    first, second = (rank["adapters alone"] for rank in pair)
    assert first["alone"].keys() == {"shared_memory", "process_group", "safetensors"}
    for got in first["alone"].values():
        assert furthest(got, expected) <= 1e-5
    assert all(got == {} for got in second["alone"].values())
    assert first["adapter"] == second["adapter"] == strategy.offer("safetensors", 4).adapter
    assert (first["gathered"], second["gathered"]) == (0, 0)


def test_one_rank_has_the_pictures_and_both_step_the_vision_tower(pair: list[dict[str, Any]], pictures: Path) -> None:
    options = {"objective": Objective(LossChoice("vanilla"))}
    shown = [Update(make_picture_rows(pictures, (True, False), i), lr=1e-3) for i in range(2)]
    expected = TorchStrategy(None, context(pictures, **options))
    same(results_of(pair, "pictures"), run_updates(expected, shown))
    for rank in pair:
        assert furthest(rank["pictures"]["weights"], weights_of(expected)) <= 1e-5


def test_nothing_is_compiled_and_nothing_said(pair: list[dict[str, Any]], shared: Path) -> None:
    assert not (shared / "pair" / "compiled").exists()
    for rank in range(2):
        lines = (shared / "pair" / f"said-{rank}.txt").read_text().splitlines()
        assert [line.rpartition(" ")[0] for line in lines] == list(pair[rank])


def test_ranks_wait_for_each_other_as_long_as_the_configuration_says_in_deepspeed_s_groups_too(
    pair: list[dict[str, Any]],
) -> None:
    for rank in pair:
        assert all(set(reported["waits"]) == {200.0} for reported in rank.values())
        assert max(len(reported["waits"]) for reported in rank.values()) > 1


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_under_every_aggregation_is_the_same_objective(
    pair: list[dict[str, Any]], folder: Path, loss: str
) -> None:
    case = losses_case(folder, loss)
    for ratio, objective in case["objectives"].items():
        strategy = TorchStrategy(None, context(folder, **{**case["context"], "objective": objective}))
        same(results_of(pair, f"loss {loss}", ratio), run_updates(strategy, case["updates"]))


@pytest.fixture(scope="module")
def resumed(pair: list[dict[str, Any]], folder: Path, shared: Path) -> list[dict[str, Any]]:
    """New processes that load what the first pair saved, and such as may not."""
    cases: dict[str, Any] = {
        f"saved {name}": {
            "model": folder,
            "config": FORMS[name],
            "context": {"dtype": dtype},
            "load": shared / f"state-{name}",
            "updates": LATER,
        }
        for name, dtype in SAVED.items()
    }
    cases["another stage"] = {"model": folder, "config": zero(2), "load": shared / "state-1", "weights": False}
    return run_cases(cases, shared / "resumed")


@pytest.mark.parametrize("form", SAVED)
def test_new_processes_resume_exactly(pair: list[dict[str, Any]], resumed: list[dict[str, Any]], form: str) -> None:
    for before, after in zip(pair, resumed, strict=True):
        one, two = before[f"saved {form}"], after[f"saved {form}"]
        assert [(r.loss, r.grad_norm, dict(r.sums)) for r in one["after"]] == [
            (r.loss, r.grad_norm, dict(r.sums)) for r in two["results"]
        ]
        assert furthest(one["weights"], two["weights"]) == 0.0
        assert torch.equal(one["noise"], two["noise"])


def test_a_state_of_another_stage_is_refused_in_one_line(resumed: list[dict[str, Any]]) -> None:
    for rank in resumed:
        assert rank["another stage"]["error"].endswith(
            "was saved with zero_stage '1', this run has '2'. Fix: resume from a checkpoint of the same run"
        )


def test_a_state_of_another_number_of_processes_is_refused_in_one_line(
    resumed: list[dict[str, Any]], build: Callable[..., Any], shared: Path
) -> None:
    strategy = build(zero(1))
    before = weights_of(strategy)
    with pytest.raises(CheckpointError, match=r"was saved with processes '2', this run has '1'") as caught:
        strategy.load(shared / "state-1")
    assert "\n" not in str(caught.value)
    assert furthest(weights_of(strategy), before) == 0.0


def test_an_empty_share_was_among_the_updates() -> None:
    assert min(len(part) for part in deal(make_rows(2, COUNTS[2]), 2)) == 0
