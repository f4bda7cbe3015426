"""Before a run: everything that is wrong, each in one line, apart from what the machine lacks; nothing is started or
written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from toy_runs import Toy, found, loaded, only, plugin

from turnwise.config.schema import Choice
from turnwise.errors import ConfigError, MachineError
from turnwise.planning import preflight as module
from turnwise.planning.preflight import Findings, chosen, refuse
from turnwise.testing.compare import says


def test_a_good_configuration_has_no_findings_and_leaves_no_trace(toy: Toy, tmp_path: Path) -> None:
    path = toy()
    before = sorted(tmp_path.rglob("*"))
    assert found(path) == Findings([], [])
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in p.parts] == before


def test_findings_are_refused_the_configuration_first() -> None:
    refuse(Findings([], []))
    with pytest.raises(ConfigError) as caught:
        refuse(Findings(["a", "b"], ["c"]))
    assert (caught.value.problems, caught.value.besides) == (["a", "b"], ["machine: c"])
    with pytest.raises(MachineError, match="c\nd"):
        refuse(Findings([], ["c", "d"]))


# ---------------------------------------------------------------- roles


def test_a_player_cannot_be_trained_on(toy: Toy) -> None:
    line = only(
        found(
            toy(actor_infer={"strategy_args": {"strategy_name": "first"}, "generating_args": {"max_new_tokens": 4}})
        ).config
    )
    assert line.startswith(
        "$.actor_infer: 'first' gives no token ids, so nothing can be trained on its responses. Fix: train with a"
        " backend such as hf"
    )


def test_a_role_without_a_strategy_says_what_to_write(toy: Toy) -> None:
    config = loaded(toy())
    line = only(found(toy(), actor_train=evolve(config.actor_train, strategy_args=None)).config)
    says(line, "$.actor_train.strategy_args", "missing", "Fix: name a strategy", "{strategy_name: torch}")


def test_roles_without_a_common_transport_are_reported_before_anything_is_loaded(toy: Toy, tmp_path: Path) -> None:
    backend = """
from turnwise.testing.fakes import FakeBackend

class Deaf(FakeBackend):
    @staticmethod
    def transports(config, context):
        return ("pigeon",)

class Shares(FakeBackend):
    @staticmethod
    def transports(config, context):
        return ("shared",)

@turnwise.hookimpl
def inference_backends():
    return [Implementation(n, c, config="turnwise.testing.fakes:FakeBackendConfig") for n, c in (("deaf", Deaf), ("shares", Shares))]
"""
    path = toy(plugins=plugin(tmp_path, backend))
    line = only(found(path, "actor_infer.strategy_args.strategy_name=deaf").config)
    says(line, "$.actor_infer", "pigeon", "actor_train offers fake, shared", "Fix: choose two that share one")
    shares = "actor_infer.strategy_args.strategy_name=shares"
    assert found(path, shares).config == []
    line = only(found(path, shares, "actor_train.model_args.dtype=fp32").config)
    assert line.startswith(
        "$.actor_infer.model_args.dtype: bf16, actor_train has fp32: the weights of this backend are shared"
    )
    correction = "train_infer_correction={is_weight: {enabled: true}}"
    line = only(found(path, shares, correction).config)
    assert line.startswith(
        "train_infer_correction compares old log-probs with the sampler's, but here they are the sampler's"
    )
    assert found(path, shares, correction, "recompute_old_logprobs=true").config == []


def test_what_a_role_says_of_itself_is_sorted_into_configuration_and_machine(toy: Toy, tmp_path: Path) -> None:
    strategy = """
from turnwise.errors import Problem
from turnwise.testing.fakes import FakeStrategy

class Careful(FakeStrategy):
    @staticmethod
    def check(config, context):
        return [Problem(f"{context.role}.x", "too small. Fix: x: 2"), Problem("", "needs a fan, found none", machine=True)]

@turnwise.hookimpl
def train_strategies():
    return [Implementation("careful", Careful)]
"""
    path = toy(
        plugins=plugin(tmp_path, strategy),
        kl_loss_coef=0.1,
        actor_train={"strategy_args": {"strategy_name": "careful"}},
    )
    assert found(path) == Findings(
        ["$.actor_train.x: too small. Fix: x: 2", "$.reference.x: too small. Fix: x: 2"], ["needs a fan, found none"]
    )


def test_roles_of_one_process_cannot_have_two_values_of_a_variable(toy: Toy) -> None:
    both = ["actor_train.system_envs={A: '1', B: x}", "actor_infer.system_envs={A: '2', C: y}"]
    line = only(found(toy(), *both).config)
    says(line, "$.actor_infer.system_envs.A", "'2' here", "'1' for actor_train", "'local'", "Fix: one value for both")
    assert found(toy(), "system_envs={A: 1}") == Findings([], [])


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"lr_scheduler_type": "cosin"},
            "$.actor_train.training_args.lr_scheduler_type: 'cosin' is unknown. Did you mean 'cosine'?",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 7.0}},
            "$.actor_train.training_args.lr_scheduler_kwargs.min_lr: 7.0 is not below learning_rate 5.0",
        ),
        (
            {"lr_scheduler_type": "polynomial", "learning_rate": 1e-8},
            "$.actor_train.training_args.lr_scheduler_kwargs.lr_end: 1e-07 is not below learning_rate 1e-08",
        ),
        (
            {"lr_scheduler_type": "wsd", "warmup_steps": 2, "lr_scheduler_kwargs": {"num_decay_steps": 2}},
            (
                "$.actor_train.training_args.lr_scheduler_kwargs: warm-up, stable and decay phase take 4 pipeline"
                " steps, and max_steps is 3"
            ),
        ),
        (
            {"lr_scheduler_type": "wsd"},
            "$.actor_train.training_args.lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_reported_with_its_path(toy: Toy, args: dict[str, Any], expected: str) -> None:
    actor = {
        "strategy_args": {"strategy_name": "fake"},
        "training_args": {"learning_rate": 5.0, "per_device_train_batch_size": 2, **args},
    }
    assert only(found(toy(actor_train=actor)).config).startswith(expected)


# ---------------------------------------------------------------- everything else that is named


def test_whatever_is_named_is_imported_before_the_start(toy: Toy, tmp_path: Path) -> None:
    records = "[Implementation('torn', 'tw_not_there:Log'), Implementation('far', object, requires='tw_absent')]"
    torn = f"@turnwise.hookimpl\ndef loggers():\n    return {records}\n"
    path = toy(plugins=plugin(tmp_path, torn), track_with=["torn", "far"])
    got = found(path)
    assert only(got.config).startswith(
        "logger 'torn' (from ./more.py) cannot be loaded from 'tw_not_there:Log': ModuleNotFoundError"
    )
    says(only(got.machine), "logger 'far'", "needs tw_absent, not installed", "Fix: install it")


def test_arithmetic_that_refuses_its_settings_is_reported_before_the_start(toy: Toy, tmp_path: Path) -> None:
    policy = """
from turnwise.errors import ConfigError

class Picky:
    def __init__(self, config, context):
        raise ConfigError(f"batch_adjust_mode picky: U = {context.unit} of {context.rollout_batch_size} does not suit. Fix: another")

@turnwise.hookimpl
def batch_adjusts():
    return [Implementation("picky", Picky)]
"""
    path = toy(plugins=plugin(tmp_path, policy), batch_adjust_mode="picky")
    assert only(found(path).config) == "batch_adjust_mode picky: U = 2 of 4 does not suit. Fix: another"


@pytest.mark.parametrize(
    ("hook", "key", "kind"),
    [
        ("policy_losses", "pg_variant", "policy_loss"),
        ("advantage_estimators", "adv_estimator", "advantage_estimator"),
        ("loggers", "track_with", "logger"),
    ],
)
def test_a_constructor_that_does_not_take_config_and_context_is_reported_with_the_plugin(
    toy: Toy, tmp_path: Path, hook: str, key: str, kind: str
) -> None:
    body = f"class Odd:\n    pass\n@turnwise.hookimpl\ndef {hook}():\n    return [Implementation('odd', Odd)]\n"
    path = toy(plugins=plugin(tmp_path, body), **{key: ["odd"] if key == "track_with" else "odd"})
    line = only(found(path).config)
    says(
        line, f"{kind} 'odd'", "./more.py", "(config, context): too many positional arguments", "Fix: repair the plugin"
    )


def test_an_estimator_without_members_of_its_contract_is_reported_with_the_plugin(toy: Toy, tmp_path: Path) -> None:
    body = (
        "class Half:\n    def __init__(self, config, context):\n        pass\n    def compute(self, batch):\n       "
        " pass\n"
    )
    body += "@turnwise.hookimpl\ndef advantage_estimators():\n    return [Implementation('half', Half)]\n"
    line = only(found(toy(plugins=plugin(tmp_path, body), adv_estimator="half")).config)
    says(line, "'half'", "./more.py", "lacks token_rewards, whiten, normalization", "Fix: repair the plugin")


def test_an_estimator_whose_constructor_fails_is_reported_with_the_plugin(toy: Toy, tmp_path: Path) -> None:
    body = "class Odd:\n    def __init__(self, config, context):\n        raise KeyError('x')\n"
    body += "@turnwise.hookimpl\ndef advantage_estimators():\n    return [Implementation('odd', Odd)]\n"
    line = only(found(toy(plugins=plugin(tmp_path, body), adv_estimator="odd")).config)
    says(line, "'odd'", "./more.py", "KeyError: 'x'", "Fix: repair the plugin, or its options")


def test_a_baseline_must_be_a_player(toy: Toy) -> None:
    assert found(toy(baselines=["first"])).config == []
    line = only(found(toy(baselines=["first", "fake"])).config)
    says(line, "$.baselines", "'fake_backend' needs a model", "Fix: name players, such as random")


def test_a_model_that_is_not_there_is_reported_when_the_rest_is_right(toy: Toy) -> None:
    assert only(found(toy(pretrain="no/such/model")).config).startswith(
        "$.pretrain: 'no/such/model' is not a folder with weights.npy."
    )


def test_a_folder_beside_the_yaml_is_found_from_anywhere(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toy(pretrain="model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.npy").write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert found(path).config == []


@pytest.mark.parametrize("key", ["output_dir", "logging_dir", "render_save_dir", "rollout_dump_dir"])
def test_a_folder_that_cannot_be_written_is_the_machines_fault(toy: Toy, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    got = found(toy(**{key: "file/deep"}))
    assert got.config == []
    says(only(got.machine), key, f"{tmp_path / 'file'} is not a folder", f"Fix: choose another {key}")


def test_a_folder_on_a_read_only_disk_is_reported(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", refuses)
    line = only(found(toy()).machine)
    says(line, "output_dir", "out cannot be written", "Read-only file system", "Fix: choose another output_dir")


def test_a_checkpoint_that_cannot_be_resumed_is_reported(toy: Toy, tmp_path: Path) -> None:
    assert found(toy(resume_from_checkpoint=True)).config == []  # the first run of a command that is always the same
    (tmp_path / "out" / "checkpoints" / "checkpoint-000002").mkdir(parents=True)
    for setting in (True, "out/checkpoints/checkpoint-000002"):
        assert "is not a checkpoint: it has no manifest.json" in only(found(toy(resume_from_checkpoint=setting)).config)


def test_all_kinds_of_findings_come_together_each_once(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    actor = {"strategy_args": {"strategy_name": "fake"}, "training_args": {"lr_scheduler_type": "cosin"}}
    got = found(toy(actor_train=actor, baselines=["fake", "fake"], output_dir="file", resume_from_checkpoint="nowhere"))
    assert [line.split(":")[0] for line in got.config] == [
        "$.actor_train.training_args.lr_scheduler_type",
        "$.baselines",
        "$.resume_from_checkpoint",
    ]
    assert len(got.machine) == 1


def test_every_implementation_that_the_run_names_is_looked_at(toy: Toy) -> None:
    config = loaded(toy(baselines=["first"], kl_loss_coef=0.1, group_filters=["fake"]))
    assert sorted({kind for kind, _ in chosen(config)}) == sorted(
        [
            "advantage_estimator", "batch_adjust", "env_manager", "environment", "group_filter", "inference_backend", "logger", "model_source",
            "policy_loss", "runtime", "train_strategy",
        ]
    )  # fmt: skip
    assert ("inference_backend", Choice("first")) in list(chosen(config))


def test_adapters_alone_need_both_sides(toy: Toy, tmp_path: Path) -> None:
    both = """
from turnwise.contracts.inference import BackendCapabilities
from turnwise.contracts.train import StrategyCapabilities
from turnwise.testing.fake_model import FakeStrategy
from turnwise.testing.fakes import FakeBackend, FakeBackendConfig

class Offers(FakeStrategy):
    capabilities = StrategyCapabilities(adapters=True)

class Takes(FakeBackend):
    capabilities = BackendCapabilities(adapters=True)

@turnwise.hookimpl
def inference_backends():
    return [Implementation("takes", Takes, config=FakeBackendConfig)]

@turnwise.hookimpl
def train_strategies():
    return [Implementation("offers", Offers)]
"""
    path = toy(plugins=plugin(tmp_path, both))
    rank, sync = "actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_sync=adapter"
    offers, takes = "actor_train.strategy_args.strategy_name=offers", "actor_infer.strategy_args.strategy_name=takes"
    line = "$.actor_train.model_args.lora_sync: the strategy of {} whole weights only. Fix: lora_sync: merged"
    assert only(found(path, rank, sync, takes).config) == line.format("actor_train offers")
    assert only(found(path, rank, sync, offers).config) == line.format("actor_infer takes")
    assert found(path, rank, sync, offers, takes).config == []
    assert found(path, rank).config == found(path, sync).config == []


def test_a_logger_says_before_the_start_what_is_wrong_and_what_the_machine_lacks(toy: Toy, tmp_path: Path) -> None:
    body = """
from turnwise.errors import Problem

class Far:
    def __init__(self, config, context):
        raise RuntimeError("it is not built before the start")

    @staticmethod
    def check(config, context):
        yield Problem("mode", f"no key for {context.exp_name}. Fix: mode: offline", machine=True)
        yield Problem("", "it needs a name. Fix: one")

class Torn(Far):
    @staticmethod
    def check(config, context):
        raise KeyError("x")

@turnwise.hookimpl
def loggers():
    return [Implementation("far", Far), Implementation("torn", Torn)]
"""
    path = toy(plugins=plugin(tmp_path, body), track_with=["jsonl", "far", "torn"], exp_name="trial")
    got = found(path)
    assert got.machine == ["$.track_with[1].mode: no key for trial. Fix: mode: offline"]
    broken = "logger 'torn' (from ./more.py): its check failed: KeyError: 'x'. Fix: repair the plugin."
    assert got.config == ["$.track_with[1]: it needs a name. Fix: one", f"$.track_with[2]: {broken}"]
