"""The pages of plugins are true: their examples keep their contracts and train, alone and together."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import fields
from doc_pages import DOCS, described_metrics, example_of, excerpt, page_of, table, turnwise

from turnwise.contracts.batch_adjust import AdjustContext
from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.env_manager import ManagerContext
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.group_filter import FilterContext
from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.logger import LoggerContext
from turnwise.contracts.loss import LossContext
from turnwise.contracts.runtime import RuntimeContext
from turnwise.contracts.train import TrainContext
from turnwise.data import normalise, ops
from turnwise.hookspecs import KINDS
from turnwise.plugins import Registry
from turnwise.testing.runs import FAKES, written
from turnwise.testing.subject import Subject
from turnwise_losses import segments


@pytest.mark.parametrize("hook", KINDS)
def test_the_example_of_every_hook_is_a_plugin_of_its_kind(hook: str, tmp_path: Path) -> None:
    known = Registry()
    known.declare([example_of(hook, tmp_path)], tmp_path)
    (entry,) = known.entries()
    assert entry.kind == KINDS[hook]
    assert entry.target() is not None
    page = page_of(hook).read_text(encoding="utf-8")
    assert re.search(rf"(\[|\b(use|env_type|runtime|strategy_name): ){entry.name}\b", page), (
        f"no YAML of the page names {entry.name!r}."
    )


@pytest.mark.parametrize("hook", KINDS)
def test_the_example_of_every_hook_keeps_its_contract(hook: str, tmp_path: Path) -> None:
    name = example_of(hook, tmp_path)
    done = turnwise(tmp_path, "test-plugin", f"./{name}", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


FURTHER = {
    "phone_book.py": (DOCS / "plugins" / "environments.md", '"phone_book"'),
    "own_dice.py": (DOCS / "plugins" / "environments.md", '"own_dice"'),
    "thrifty.py": (DOCS / "plugins-in-general.md", '"thrifty"'),
}
"""Further plugins of the pages: the file, the page, and what only its block has."""


@pytest.mark.parametrize("name", FURTHER)
def test_further_plugins_of_the_pages_keep_their_contracts(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(excerpt(*FURTHER[name]), encoding="utf-8")
    done = turnwise(tmp_path, "test-plugin", f"./{name}", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


COSTS = """
import turnwise
from turnwise.testing.fakes import FakeEnvironment

class Costly(FakeEnvironment):
    def step(self, action):
        *answer, info = super().step(action)
        return *answer, info | {"metrics": {"cost": 0.1 * len(action)}}

@turnwise.hookimpl
def environments():
    return [turnwise.Implementation("costly", Costly)]
"""
"""An environment that tells what a turn cost."""


def test_further_plugins_of_the_pages_train(tmp_path: Path) -> None:
    for name, where in FURTHER.items():
        (tmp_path / name).write_text(excerpt(*where), encoding="utf-8")
    (tmp_path / "costs.py").write_text(COSTS, encoding="utf-8")
    growing = {"env_manager": "costed", "max_steps": 3}
    changes = {
        "plugins": ["turnwise.testing.plugin", "./costs.py", *(f"./{name}" for name in FURTHER)],
        "adv_estimator": "thrifty",
        "track_with": ["jsonl"],
        "sequence_length": 1024,
        "rollout_batch_size": 12,
        "train_env_manager": {"num_env_groups": 6, "group_size": 2, "tags": ["Costs", "Book", "Dice"]},
        "val_env_manager": {"num_env_groups": 3, "group_size": 1, "tags": ["Costs", "Book", "Dice"]},
        "custom_envs": {
            "Costs": {"env_type": "costly", **growing},
            "Book": {"env_type": "phone_book", **growing},
            "Dice": {"env_type": "own_dice", **growing},
        },
    }
    (tmp_path / "run.yaml").write_text(written(FAKES, changes), encoding="utf-8")
    done = turnwise(tmp_path, "train", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["env/Costs/cost"] > 0
    assert json.loads(lines[0])["env/Book/success"] == 0  # told at every call, and never true


def contexts() -> list[tuple[str, type]]:
    """(hook, the class of what its implementations are built with)."""
    known = {
        "env_managers": ManagerContext,
        "inference_backends": InferenceContext,
        "train_strategies": TrainContext,
        "advantage_estimators": EstimatorContext,
        "policy_losses": LossContext,
        "batch_adjusts": AdjustContext,
        "group_filters": FilterContext,
        "loggers": LoggerContext,
        "runtimes": RuntimeContext,
        "model_sources": ModelSourceContext,
    }
    return sorted(known.items())


@pytest.mark.parametrize(("hook", "context"), contexts(), ids=lambda value: getattr(value, "__name__", value))
def test_what_an_implementation_is_built_with_stands_on_its_page(hook: str, context: Any) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", page_of(hook).read_text(encoding="utf-8")))
    assert [field.name for field in fields(context) if not re.search(rf"\b{field.name}\b", code)] == []


def test_every_key_of_a_fixture_stands_on_the_page() -> None:
    keys = set(re.findall(r"`(\w+)(?:\([\w, ]*\))?`", (Subject.__doc__ or "").partition("these keys:")[2])) - {
        "info",
        "ids",
    }
    cells = " ".join(row[0] for row in table("plugins-in-general.md", "key"))
    assert {key for key in keys if not re.search(rf"\b{key}\b", cells)} == set()


@pytest.mark.parametrize("module", [ops, normalise, segments], ids=lambda module: module.__name__)
def test_every_helper_stands_on_a_page(module: ModuleType) -> None:
    text = "".join(page_of(hook).read_text(encoding="utf-8") for hook in ("advantage_estimators", "policy_losses"))
    public = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
    assert [name for name in public if name[0] != "_" and f"`{name}" not in text] == []


TOGETHER = """
plugins: [turnwise.testing.plugin, ./find_coin.py, ./reactive.py, ./lazy.py, ./bigram.py, ./median.py, ./weighted_negative.py,
  ./fixed_parts.py, ./not_too_easy.py, ./csv_logger.py, ./one_thread.py]
output_dir: run
pretrain: fake
model_source: fake
runtime: one_thread
max_steps: 2
eval_steps: 2
rollout_batch_size: 8
sequence_length: 512
adv_estimator: {use: median, positive_only: true}
pg_variant: weighted_negative
negative_weight: 0.3
batch_adjust_mode: {use: fixed_parts, parts: 3}
group_filters: [{use: not_too_easy, success_rate: 0.8}]
track_with: [{use: csv, file: numbers.csv}, jsonl]
baselines: [{use: lazy, epsilon: 0.0}]
init_kl_coef: 0.1
actor_train: {strategy_args: {strategy_name: bigram}, training_args: {learning_rate: 0.1}}
actor_infer: {strategy_args: {strategy_name: fake}, generating_args: {max_new_tokens: 4}}
train_env_manager: {num_env_groups: 2, group_size: 4}
val_env_manager: {num_env_groups: 4, group_size: 1}
custom_envs:
  Coin: {env_type: find_coin, env_manager: {use: reactive, system: Answer left or right.}, max_steps: 4}
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps made of the examples of all pages but the model source's."""
    folder = tmp_path_factory.mktemp("together")
    for hook in KINDS:
        example_of(hook, folder)
    (folder / "run.yaml").write_text(TOGETHER, encoding="utf-8")
    done = turnwise(folder, "train", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_examples_train_together(together: Path) -> None:
    lines = [json.loads(line) for line in (together / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["policy/updates"] == 3
    assert "| lazy |" in (together / "run" / "report.md").read_text(encoding="utf-8")
    assert (together / "run" / "numbers.csv").read_text(encoding="utf-8").startswith("0,")


def test_every_metric_of_a_run_is_described(together: Path) -> None:
    patterns = [re.compile(re.sub(r"<[^>]*>", "[^/]+", name.replace("|", r"\|")) + "$") for name in described_metrics()]
    for line in (together / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        unknown = [n for n in json.loads(line) if n != "step" and not any(p.match(n) for p in patterns)]
        assert unknown == []
