"""Fixtures of the core's tests: a registry of fake implementations, and a run's YAML to change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen, validators

from turnwise import Implementation
from turnwise.config import Loaded, load
from turnwise.contracts.estimator import EstimatorCapabilities
from turnwise.contracts.loss import LossCapabilities
from turnwise.contracts.train import StrategyCapabilities
from turnwise.data.normalise import RewardNormalization
from turnwise.errors import Problem
from turnwise.plugins import DISABLE, Entry, Registry, reset_registry
from turnwise.testing.runs import FAKES, written

# plugin_files: the suite runs in importlib mode, where folders of tests are on no path.
sys.path.insert(0, str(Path(__file__).parent))
from plugin_files import GUESS, HEADER, Install

BASE = """\
max_steps: 10
rollout_batch_size: 16
pretrain: some/model
sequence_length: 256
adv_estimator: grpo
pg_variant: ppo
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 4}
  strategy_args: {strategy_name: trainer, strategy_config: {stage: 2}}
actor_infer:
  generating_args: {max_new_tokens: 32, temperature: 0.9, top_p: 0.95}
  strategy_args: {strategy_name: sampler}
train_env_manager: {num_env_groups: 4, group_size: 4, tags: [Lake]}
custom_envs:
  Lake: {env_type: lake, env_config: {size: 4}}
"""


@frozen
class GrpoOptions:
    reward_normalization: RewardNormalization | None = None


@frozen
class GigpoOptions:
    gamma: float = 0.95
    step_reward_gamma: float = 0.95
    step_reward_weight: float = 1.0
    episode_reward_weight: float = 1.0
    reward_normalization: RewardNormalization | None = None


@frozen
class StepOptions:
    step_reward_gamma: float = 0.95


@frozen
class GaeOptions:
    gamma: float = 1.0
    lambd: float = 0.95


@frozen
class PpoOptions:
    pg_clip: float = field(default=0.2, validator=validators.gt(0))
    pg_clip_low: float | None = None
    pg_clip_high: float | None = None
    dual_clip_loss: bool = False
    dual_clip_c: float | None = None

    def check(self, run: Any) -> Iterator[Problem]:
        if self.dual_clip_c is not None and not self.dual_clip_loss:
            yield Problem("dual_clip_c", "has no effect: dual_clip_loss is false", warning=True)


@frozen
class VanillaOptions:
    capabilities = LossCapabilities(uses_ratio=False)


@frozen
class GspoOptions:
    gspo_level: str = "segment"


@frozen
class DppoOptions:
    capabilities = LossCapabilities(own_ratio=True, needs_infer_log_probs=True)


@frozen
class TrainerOptions:
    stage: int = 0
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    betas: tuple[float, float] = (0.9, 0.999)

    @property
    def capabilities(self) -> StrategyCapabilities:
        return StrategyCapabilities(data_parallel_size=self.data_parallel_size)

    def data_parallel_size(self, world: int) -> int:
        if world % self.tensor_model_parallel_size:
            raise ValueError(
                f"{world} devices are not divisible by tensor_model_parallel_size {self.tensor_model_parallel_size}"
            )
        return world // self.tensor_model_parallel_size


@frozen
class SamplerOptions:
    gpu_memory_utilization: float = 0.9
    engine_args: dict[str, Any] = field(factory=dict)


@frozen
class TrajectoryOptions:
    history: str = "messages"
    action_pattern: str | None = None
    format_penalty: float = 0.0
    agent_system_template: str | None = None
    agent_template: str | None = None
    pre_step_template: str | None = None
    next_step_template: str | None = None


@frozen
class StepwiseOptions(TrajectoryOptions):
    history_length: int | None = None
    merge_steps: bool = False


@frozen
class FileOptions:
    folder: str = "logs"
    every: int = 1


class Lake:
    def __init__(self, size: int = 4, is_slippery: bool = False) -> None:
        self.size = size


class Gae:
    capabilities = EstimatorCapabilities(needs=frozenset({"values"}))


class Grpo:
    capabilities = EstimatorCapabilities(compares_in_groups=True)


class Wall:
    def __init__(self, config: None, context: object, height: int = 1) -> None:
        self.height = height


RECORDS: list[tuple[str, Implementation]] = [
    ("environment", Implementation("lake", Lake)),
    ("environment", Implementation("pond", Lake, requires=("package_that_is_not_there",))),
    ("env_manager", Implementation("trajectory", object, TrajectoryOptions)),
    ("env_manager", Implementation("stepwise", object, StepwiseOptions)),
    ("inference_backend", Implementation("sampler", object, SamplerOptions, aliases=("sampler_infer",))),
    ("inference_backend", Implementation("random", object)),
    (
        "train_strategy",
        Implementation(
            "trainer", object, TrainerOptions, aliases=("trainer_train",), presets={"trainer_zero3": {"stage": 3}}
        ),
    ),
    ("advantage_estimator", Implementation("grpo", Grpo, GrpoOptions)),
    ("advantage_estimator", Implementation("gigpo", Grpo, GigpoOptions)),
    ("advantage_estimator", Implementation("step", Grpo, StepOptions)),
    ("advantage_estimator", Implementation("gae", Gae, GaeOptions)),
    ("policy_loss", Implementation("ppo", object, PpoOptions)),
    ("policy_loss", Implementation("vanilla", object, VanillaOptions)),
    ("policy_loss", Implementation("gspo", object, GspoOptions)),
    ("policy_loss", Implementation("dppo", object, DppoOptions)),
    ("batch_adjust", Implementation("by_trajectory", object)),
    ("batch_adjust", Implementation("copy", object)),
    ("group_filter", Implementation("no_signal", object)),
    ("logger", Implementation("console", object)),
    ("logger", Implementation("jsonl", object, FileOptions)),
    ("logger", Implementation("wall", Wall)),
    ("logger", Implementation("torn", object, "a_module_that_is_not_there:Config")),
    ("runtime", Implementation("local", object)),
    ("model_source", Implementation("hf", object)),
]


@pytest.fixture
def fake_registry() -> Registry:
    """Fakes of every kind, built by hand: nothing of this machine's plugins."""
    return Registry(entries=[Entry(kind, record, "fakes", "made-for-tests", "1.0") for kind, record in RECORDS])


@pytest.fixture
def base_yaml() -> str:
    """The YAML of a small run, to change."""
    return BASE


@pytest.fixture
def run_yaml(tmp_path: Path, fake_registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loaded]:
    """`run_yaml(text, *overrides)`: load the base YAML with `text` below it (or `text` alone with base=False)."""
    monkeypatch.chdir(tmp_path)

    def run(text: str = "", *overrides: str, base: bool = True, name: str = "run.yaml") -> Loaded:
        Path(name).write_text((BASE if base else "") + text, encoding="utf-8")
        return load(name, overrides, registry=fake_registry)

    return run


TOY = {**FAKES, "exp_name": "toy", "plugins": ["turnwise.testing.plugin", "./players.py"]}

PLAYERS = """\
import turnwise
from turnwise.contracts.player import Player, chosen

class First(Player):
    '''Always the first legal action.'''

    def __init__(self, config, context):
        pass

    async def generate(self, request):
        return chosen(request.actions[0])

@turnwise.hookimpl
def inference_backends():
    return [turnwise.Implementation("first", First)]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`toy(max_steps=1, ...)`: the YAML of a whole run on the fakes and a player, with top-level keys changed, in the
    current folder.

    A key that is None is left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "players.py").write_text(PLAYERS, encoding="utf-8")
    reset_registry()

    def write(name: str = "toy.yaml", **changes: Any) -> Path:
        path = tmp_path / name
        path.write_text(written(TOY, changes), encoding="utf-8")
        return path

    yield write
    reset_registry()


@pytest.fixture
def modules_of_the_test_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of plugins that a test wrote are forgotten after it; no plugin is disabled meanwhile."""
    monkeypatch.delenv(DISABLE, raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("tw_", "turnwise_file_")):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install("turnwise-guess", source)`: a distribution with one module and one entry point on the path; its module's
    file."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def make(
        name: str, source: str = GUESS, version: str = "1.2", requires: tuple[str, ...] = (), entry: str | None = ""
    ) -> Path:
        module = "tw_" + re.sub(r"\W", "_", name)
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
            *(f"Requires-Dist: {one}" for one in requires),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if entry is not None:
            (info / "entry_points.txt").write_text(f"[turnwise]\n{name.removeprefix('turnwise-')} = {module}{entry}\n")
        (site / f"{module}.py").write_text(HEADER + source)
        monkeypatch.syspath_prepend(site)  # forget what the finders remember
        return site / f"{module}.py"

    return make
