"""The documentation is true: its examples run, its YAML parses, its links lead somewhere, its numbers and metric names
are the code's."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from attrs import fields

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
from turnwise.pipeline.aggregation import token_coefficients
from turnwise.planning.schedules import Schedule, learning_rate
from turnwise.plugins import Registry, registry
from turnwise.testing.runs import FAKES, written
from turnwise.testing.subject import Subject
from turnwise_losses import segments

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("plugins/*/*/README.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
)
CORE = ROOT / "core" / "src" / "turnwise"
METRIC = re.compile(r"^(correction|critic|policy|rollout|tokens|tps|group|env|val|system|time)/")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def page_of(hook: str) -> Path:
    return DOCS / "plugins" / f"{hook.replace('_', '-')}.md"


def example_of(hook: str, folder: Path) -> str:
    """Write the example of a hook's page into `folder` under the name that its YAML uses; returns that name."""
    page = page_of(hook)
    plugins = [item for block in blocks(page, "yaml") for item in yaml.safe_load(block).get("plugins", ())]
    (name,) = {item for item in plugins if item.endswith(".py")}
    (folder / name).write_text(blocks(page, "python")[0], encoding="utf-8")
    return str(name)


def excerpt(page: Path, hooks: str) -> str:
    """The one block of a page that has this text."""
    (code,) = [block for block in blocks(page, "python") if hooks in block]
    return code


def turnwise(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in `folder`."""
    command = [sys.executable, "-m", "turnwise.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


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


def described_metrics() -> list[str]:
    """The names between backticks of docs/metrics.md; `<…>` stands for a part that varies."""
    return re.findall(r"`([a-z]+/[^`]*)`", (DOCS / "metrics.md").read_text(encoding="utf-8"))


def test_every_metric_of_a_run_is_described(together: Path) -> None:
    patterns = [re.compile(re.sub(r"<[^>]*>", "[^/]+", name.replace("|", r"\|")) + "$") for name in described_metrics()]
    for line in (together / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        unknown = [n for n in json.loads(line) if n != "step" and not any(p.match(n) for p in patterns)]
        assert unknown == []


def literal_metrics(source: str) -> Iterator[str]:
    """Metric names in a source file, `<…>` for what is put in: literals, phases that are timed, per-token names of the
    objective."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.match(node.value):
            yield from (
                [node.value] if not node.value.endswith("/") else []
            )  # a piece of an f-string, which comes whole below
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
            if METRIC.match(text):
                yield text
    yield from (f"time/{name}" for name in re.findall(r'\.phase\("(\w+)"\)', source))
    yield from (f"policy/{name}" for name in re.findall(r'shown\["(\w+)"\]', source))
    yield from (
        f"policy/{name}"
        for table in re.findall(r"shown = \{(.*?)\*\*", source)
        for name in re.findall(r'"(\w+)":', table)
    )
    yield from (f"rollout/{name}" for name in re.findall(r'counts\["(\w+)"\] ', source))


@pytest.mark.parametrize(
    "path",
    [
        CORE / "pipeline" / "metrics.py",
        CORE / "pipeline" / "correction.py",
        CORE / "pipeline" / "evaluation.py",
        CORE / "pipeline" / "learner.py",
        CORE / "pipeline" / "loop.py",
        CORE / "pipeline" / "saving.py",
        CORE / "rollout" / "scheduler.py",
        ROOT / "plugins" / "strategies" / "torch" / "src" / "turnwise_torch" / "objective.py",
        ROOT / "plugins" / "strategies" / "torch" / "src" / "turnwise_torch" / "device.py",
    ],
    ids=lambda path: path.name,
)
def test_every_metric_name_in_the_sources_is_described(path: Path) -> None:
    patterns = {re.sub(r"<[^>]*>", "<>", name) for name in described_metrics()}
    varying = {"<>/<>", "env/<>/<>", "val/<>/<>", "val/<>", "rollout/<>", "time/<>", "policy/<>"}
    found = set(literal_metrics(path.read_text(encoding="utf-8"))) - varying
    assert found, f"no metric name was found in {path.name}."
    assert sorted(found - patterns) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_blocks_parse_and_links_lead_somewhere(page: Path) -> None:
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict), block
    for block in blocks(page, "python"):
        ast.parse(block)
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{link} leads nowhere."
        if anchor:
            titles = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], (
                f"{link}: no such section."
            )


def test_every_implementation_of_the_repository_is_named_on_its_page() -> None:
    ours = {"turnwise"} | {f"turnwise-{path.parent.name}" for path in (ROOT / "plugins").glob("*/*/pyproject.toml")}
    hooks = {kind: hook for hook, kind in KINDS.items()}
    entries = [entry for entry in Registry.discover().entries() if entry.distribution in ours]
    assert ours - {entry.distribution for entry in entries} == {
        "turnwise-serving"
    }  # a library: it brings no implementation
    shipped = {hook: page_of(hook).read_text(encoding="utf-8").partition("\nShipped: ")[2] for hook in KINDS}
    assert [f"{e.kind} {e.name}" for e in entries if f"`{e.name}`" not in shipped[hooks[e.kind]]] == []


def test_every_page_is_in_the_index() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    missing = [
        str(p.relative_to(DOCS))
        for p in DOCS.rglob("*.md")
        if p.name != "index.md" and f"({p.relative_to(DOCS)})" not in text
    ]
    assert missing == []


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose header begins with `first`, without header and rule."""
    text = (DOCS / page).read_text(encoding="utf-8")
    body = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert body, f"no table with {first!r} in {page}"
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in body[1].splitlines()]


def test_the_table_of_updates_is_the_policies_own() -> None:
    for name, *cells in table("batches-and-rates.md", "batch_adjust_mode"):
        policy = registry().build("batch_adjust", name, None, AdjustContext(unit=16, rollout_batch_size=64))
        assert [policy.updates(n) for n in (10, 64, 100, 250)] == [int(cell) for cell in cells], name


def test_the_table_of_rates_is_the_schedules_own() -> None:
    schedules = (
        Schedule("linear", 10),
        Schedule("cosine", 10),
        Schedule("cosine_with_min_lr", 10, {"min_lr_rate": 0.1}),
        Schedule("wsd", 10, {"num_decay_steps": 50}),
    )
    for step, update, count, *cells in table("batches-and-rates.md", "p"):
        rates = [f"{learning_rate(1e-6, s, int(step), int(update), int(count), 200):.3g}" for s in schedules]
        assert rates == cells, (step, update, count)


def test_the_table_of_aggregation_is_the_code_s_own() -> None:
    losses = [np.array([1.0, 2.0]), np.array([3.0, 1.0, 2.0, 2.0]), np.array([4.0, 0.0, 2.0])]
    lengths, owner = np.array([2, 4, 3]), np.array([0, 0, 1])
    for mode, _, *cells in table("batches-and-rates.md", "loss_agg_mode"):
        for unit, cell in zip(("trajectory", "sample"), cells, strict=True):
            coef = token_coefficients(mode, unit, np.arange(3), owner, np.ones(3), lengths, scale=8.0)
            assert f"{sum(c * row.sum() for c, row in zip(coef, losses, strict=True)):.4f}" == cell, (mode, unit)


@pytest.fixture
def tutorial(tmp_path: Path) -> Path:
    """A folder with the files of the tutorial."""
    page = DOCS / "writing-an-environment.md"
    (tmp_path / "my_env.py").write_text(blocks(page, "python")[0], encoding="utf-8")
    (tmp_path / "my_env.yaml").write_text(blocks(page, "yaml")[0], encoding="utf-8")
    return tmp_path


def test_the_tutorial_s_environment_is_played_and_trained(tutorial: Path) -> None:
    played = turnwise(tutorial, "rollout", "my_env.yaml", "--player", "random", "--episodes", "2")
    assert played.returncode == 0, played.stderr
    assert "=== Coin, task 1, member 0" in played.stdout
    debugged = turnwise(tutorial, "rollout", "my_env.yaml", "--player", "random", "--debug")
    assert debugged.returncode == 0, debugged.stderr
    trained = turnwise(tutorial, "train", "my_env.yaml", "max_steps=1", "eval_steps=0", "baselines=[]")
    assert trained.returncode == 0, trained.stderr
    assert (tutorial / "runs" / "coin" / "report.md").is_file()


def test_the_readmes_environment_is_the_one_of_the_tutorial() -> None:
    readme, tutorial = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/writing-an-environment.md")
    )
    for language in ("python", "yaml"):
        blocks = [re.search(rf"```{language}\n.*?```", text, re.DOTALL) for text in (readme, tutorial)]
        assert blocks[0] is not None and blocks[1] is not None
        assert blocks[0][0] == blocks[1][0]


def test_the_tutorial_s_estimator_passes_its_own_test_and_the_kit_and_trains(tmp_path: Path) -> None:
    page = DOCS / "tutorial-estimator.md"
    for name, code in zip(("gentle.py", "test_gentle.py"), blocks(page, "python"), strict=True):
        (tmp_path / name).write_text(code, encoding="utf-8")
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_gentle.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr
    checked = turnwise(tmp_path, "test-plugin", "./gentle.py", "--strict")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    readme = ROOT / "README.md"
    (tmp_path / "my_env.py").write_text(blocks(readme, "python")[0], encoding="utf-8")
    (tmp_path / "my_env.yaml").write_text(blocks(readme, "yaml")[0], encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"^```\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    (train,) = (shlex.split(line) for line in lines if line.startswith("turnwise train"))
    done = turnwise(tmp_path, *train[1:], "max_steps=2", "eval_steps=0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_arrow_of_the_architecture_runs_down() -> None:
    picture = (DOCS / "images" / "architecture.svg").read_text()
    assert "turnwise.pipeline" in picture
    assert 'stroke="red"' not in picture
