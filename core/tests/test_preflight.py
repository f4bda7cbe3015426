"""Before a run: everything that is wrong, each in one line, apart from what the machine lacks; nothing is started or
written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from turnwise.config.loader import load
from turnwise.config.schema import Choice, RunConfig
from turnwise.errors import ConfigError, MachineError
from turnwise.planning import assembly, device_problems
from turnwise.planning import preflight as module
from turnwise.planning.preflight import Findings, chosen, preflight, refuse

Toy = Callable[..., Path]


def loaded(path: Path, *overrides: str) -> RunConfig:
    return load(path, overrides).config


def found(path: Path, *overrides: str, **changes: Any) -> Findings:
    return preflight(evolve(loaded(path, *overrides), **changes), path.parent)


def there_are(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As on a machine with so many GPUs."""
    for asks in (module, device_problems):
        monkeypatch.setattr(asks, "visible_gpus", lambda: count)


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    return lines[0]


def plugin(tmp_path: Path, text: str) -> list[str]:
    """A further plugin file; the YAML's `plugins:` with it."""
    (tmp_path / "more.py").write_text("import turnwise\nfrom turnwise import Implementation\n" + text, encoding="utf-8")
    return ["turnwise.testing.plugin", "./players.py", "./more.py"]


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
    assert (
        line
        == "$.actor_train.strategy_args: missing. Fix: name a strategy, as in strategy_args: {strategy_name: torch}."
    )


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
    assert (
        line
        == "$.actor_infer: the backend takes weights by pigeon, actor_train offers fake, shared: no common transport."
        " Fix: choose two that share one."
    )
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


def test_devices_that_are_not_there_are_the_machines_lack(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, 1)
    path = toy()
    config = loaded(path)
    for mapping, expected in (
        ((0,), []),
        ((1,), ["actor_infer: device_mapping needs 2 GPUs, found 1. Fix: use devices that are here"]),
    ):
        got = found(path, actor_infer=evolve(config.actor_infer, device_mapping=mapping))
        assert got == Findings([], expected)
    there_are(monkeypatch, 0)
    assert found(path, actor_infer=evolve(config.actor_infer, device_mapping=(0,))).machine == [
        "actor_infer: device_mapping needs 1 GPU, found 0. Fix: use devices that are here"
    ]


def test_fewer_devices_than_the_run_expects_are_the_machines_lack(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, 2)
    assert found(toy(), "num_gpus_per_node=2") == Findings([], [])
    got = found(toy(), "num_gpus_per_node=8")
    assert got == Findings(
        [], ["num_gpus_per_node: 8 GPUs are expected, found 2. Fix: the number there is, or remove the key"]
    )


def test_roles_of_one_process_cannot_have_two_values_of_a_variable(toy: Toy) -> None:
    both = ["actor_train.system_envs={A: '1', B: x}", "actor_infer.system_envs={A: '2', C: y}"]
    line = only(found(toy(), *both).config)
    assert (
        line
        == "$.actor_infer.system_envs.A: '2' here, '1' for actor_train; runtime 'local' has one process. Fix: one value"
        " for both."
    )
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
    assert only(got.machine) == "logger 'far' needs tw_absent, not installed. Fix: install it, or name another"


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
    assert (
        line
        == f"{kind} 'odd' (from ./more.py) cannot be built with (config, context): too many positional arguments. Fix:"
        " repair the plugin."
    )


def test_an_estimator_without_members_of_its_contract_is_reported_with_the_plugin(toy: Toy, tmp_path: Path) -> None:
    body = (
        "class Half:\n    def __init__(self, config, context):\n        pass\n    def compute(self, batch):\n       "
        " pass\n"
    )
    body += "@turnwise.hookimpl\ndef advantage_estimators():\n    return [Implementation('half', Half)]\n"
    line = only(found(toy(plugins=plugin(tmp_path, body), adv_estimator="half")).config)
    assert (
        line
        == "advantage_estimator 'half' (from ./more.py) lacks token_rewards, whiten, normalization of its contract."
        " Fix: repair the plugin."
    )


def test_an_estimator_whose_constructor_fails_is_reported_with_the_plugin(toy: Toy, tmp_path: Path) -> None:
    body = "class Odd:\n    def __init__(self, config, context):\n        raise KeyError('x')\n"
    body += "@turnwise.hookimpl\ndef advantage_estimators():\n    return [Implementation('odd', Odd)]\n"
    line = only(found(toy(plugins=plugin(tmp_path, body), adv_estimator="odd")).config)
    assert (
        line
        == "advantage estimator 'odd' (from ./more.py) cannot be built: KeyError: 'x'. Fix: repair the plugin, or its"
        " options."
    )


def test_a_baseline_must_be_a_player(toy: Toy) -> None:
    assert found(toy(baselines=["first"])).config == []
    line = only(found(toy(baselines=["first", "fake"])).config)
    assert line == "$.baselines: 'fake_backend' needs a model, so it is no baseline. Fix: name players, such as random."


def test_an_environment_that_cannot_be_built_is_reported_with_its_options(toy: Toy, tmp_path: Path) -> None:
    bad = "class Bad:\n    def __init__(self, size=1):\n        raise ValueError('size must be even')\n"
    bad += "@turnwise.hookimpl\ndef environments():\n    return [Implementation('bad', Bad)]\n"
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake", "env_config": {"size": 3}}}
    line = only(found(toy(plugins=plugin(tmp_path, bad), custom_envs=envs)).config)
    assert line.startswith(
        "custom_envs.Toy: the environment 'bad' cannot be built with env_config {'size': 3}: ValueError: size must be"
        " even. Fix:"
    )


def environment(body: str) -> str:
    return f"class Bad:\n{body}@turnwise.hookimpl\ndef environments():\n    return [Implementation('bad', Bad)]\n"


@pytest.mark.parametrize(
    "close", ["def close(self):\n        raise RuntimeError('closed')\n", "async def close(self):\n        pass\n"]
)
def test_an_environment_that_cannot_be_closed_is_still_one_to_play(toy: Toy, tmp_path: Path, close: str) -> None:
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    assert found(toy(plugins=plugin(tmp_path, environment(f"    {close}")), custom_envs=envs)).config == []


HANG = "import threading\n        threading.Event().wait(60)\n"


def test_an_environment_whose_constructor_hangs_is_reported_within_its_timeout(toy: Toy, tmp_path: Path) -> None:
    body = environment(f"    def __init__(self):\n        {HANG}")
    manager = {"num_env_groups": 2, "group_size": 2, "tags": ["Toy"], "reset_timeout": 0.2}
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    line = only(
        found(
            toy(
                plugins=plugin(tmp_path, body),
                custom_envs=envs,
                train_env_manager=manager,
                val_env_manager=None,
                eval_steps=0,
            )
        ).config
    )
    assert line.startswith("custom_envs.Toy: the environment 'bad' was not built within reset_timeout = 0.2 s. Fix:")


def test_an_environment_whose_close_hangs_holds_nothing_up(
    toy: Toy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = environment(f"    def close(self):\n        {HANG}")
    manager = {"num_env_groups": 2, "group_size": 2, "tags": ["Toy"], "reset_timeout": 0.2}
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    findings = found(
        toy(
            plugins=plugin(tmp_path, body),
            custom_envs=envs,
            train_env_manager=manager,
            val_env_manager=None,
            eval_steps=0,
        )
    )
    assert findings.config == []
    assert "Toy.close did not end within 0.2 s" in caplog.text


def test_an_environment_whose_constructor_exits_is_reported_and_ends_nothing(toy: Toy, tmp_path: Path) -> None:
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    body = "    def __init__(self):\n        raise SystemExit(0)\n"
    line = only(found(toy(plugins=plugin(tmp_path, environment(body)), custom_envs=envs)).config)
    assert line.startswith(
        "custom_envs.Toy: the environment 'bad' cannot be built with env_config {}: SystemExit: 0. Fix:"
    )


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
    assert got == Findings([], [f"{key}: {tmp_path / 'file'} is not a folder. Fix: choose another {key}"])


def test_a_folder_on_a_read_only_disk_is_reported(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", refuses)
    line = only(found(toy()).machine)
    assert line == "output_dir: out cannot be written (Read-only file system). Fix: choose another output_dir"


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
        "nowhere is not a checkpoint",
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


def test_devices_of_a_runtime_that_has_its_own_are_not_counted_here(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = """
from attrs import frozen
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.testing.fakes import FakeRuntime

@frozen
class Cluster:
    capabilities = RuntimeCapabilities(counts_devices=False)

class Elsewhere(FakeRuntime):
    pass

@turnwise.hookimpl
def runtimes():
    return [
        Implementation("elsewhere", Elsewhere, config=Cluster),
        Implementation("lacking", "nowhere:Runtime", config=Cluster, requires=("nowhere",)),
    ]
"""
    there_are(monkeypatch, 0)
    path = toy(plugins=plugin(tmp_path, runtime))
    mapping = ["actor_train.device_mapping=[0, 1]", "actor_infer.device_mapping=[2]"]
    assert found(path, "runtime=elsewhere", *mapping).machine == []
    assert "GPU" not in only(
        found(path, "runtime=lacking", *mapping).machine
    )  # what is not installed is reported, and nothing of GPUs
    assert found(path, *mapping).machine == [
        "actor_train: device_mapping needs 2 GPUs, found 0. Fix: use devices that are here",
        "actor_infer: device_mapping needs 3 GPUs, found 0. Fix: use devices that are here",
    ]


def test_several_training_processes_need_a_runtime_of_several(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, 2)
    line = only(found(toy(runtime="local"), "actor_train.device_mapping=[0, 1]").config)
    assert (
        line == "$.actor_train.device_mapping: 2 devices are as many training processes, and runtime 'local' has one"
        " process. Fix: runtime: ray; or one device"
    )
    assert found(toy(), "actor_infer.device_mapping=[0, 1]") == Findings([], [])


MANY = """
from attrs import frozen
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.testing.fakes import FakeRuntime

@frozen
class Many:
    width: int = 3
    capabilities = RuntimeCapabilities()

class Spread(FakeRuntime):
    pass

class Crowd(FakeRuntime):
    capabilities = RuntimeCapabilities()

@turnwise.hookimpl
def runtimes():
    return [Implementation("spread", Spread, config=Many)] + TWO
"""


def test_the_one_runtime_of_several_processes_is_chosen_where_a_role_has_several_devices_and_none_is_named(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_are(monkeypatch, 2)
    several = "actor_train.device_mapping=[0, 1]"
    path = toy(plugins=["no:turnwise-ray", *plugin(tmp_path, MANY.replace("TWO", "[]"))])
    loaded = load(path, [several])
    assert (loaded.config.runtime.name, loaded.config.runtime.config.width) == ("spread", 3)
    (note,) = [note for note in loaded.notes if "runtime" in note]
    assert (
        "$.actor_train.device_mapping: several devices are as many training processes, so runtime 'spread' is" in note
    )
    assert found(path, several) == Findings([], [])
    for other in ([], [several, "runtime=local"], ["actor_infer.device_mapping=[0, 1]"]):
        assert load(path, other).config.runtime.name == "local"


def test_of_two_such_runtimes_none_is_chosen(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, 2)
    path = toy(plugins=plugin(tmp_path, MANY.replace("TWO", "[Implementation('crowd', Crowd)]")))
    line = only(found(path, "actor_train.device_mapping=[0, 1]").config)
    assert line.endswith("runtime 'local' has one process. Fix: runtime: crowd or ray or spread; or one device")


def test_devices_that_an_engine_cannot_divide_are_found_before_anything_starts(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine's own check does not speak of them."""
    pairs = """
from attrs import frozen
from turnwise.contracts.inference import BackendCapabilities
from turnwise.testing.fakes import FakeBackend

@frozen
class Pairs:
    @property
    def capabilities(self):
        return BackendCapabilities(data_parallel_size=self.data_parallel_size)

    def data_parallel_size(self, world):
        if world % 2:
            raise ValueError(f"{world} devices are not pairs")
        return world // 2

@turnwise.hookimpl
def inference_backends():
    return [Implementation("paired", FakeBackend, Pairs)]
"""
    there_are(monkeypatch, 8)
    path = toy(plugins=plugin(tmp_path, pairs))
    paired = "actor_infer.strategy_args={strategy_name: paired}"
    line = only(found(path, paired, "actor_infer.device_mapping=[0, 1, 2]").config)
    assert line == "$.actor_infer.device_mapping: 3 devices are not pairs. Fix: other sizes, or other devices"
    assert found(path, paired, "actor_infer.device_mapping=[0, 1]").config == []


@pytest.mark.parametrize(
    ("gpus", "attached", "refused"), [(1, "", True), (2, "", False), (0, "", False), (1, "http://there", False)]
)
def test_an_engine_without_devices_must_fit_into_those_that_the_runtime_gives_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, attached: str, refused: bool
) -> None:
    """Without GPUs it starts as many processes as it likes, and a server that runs already has its own."""
    both = f"""
from attrs import frozen
from turnwise.contracts.inference import BackendCapabilities
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.testing.fakes import FakeBackend, FakeRuntime

@frozen
class Pairs:
    server: str = ""

    @property
    def capabilities(self):
        return BackendCapabilities(attached=bool(self.server), data_parallel_size=self.data_parallel_size)

    def data_parallel_size(self, world):
        if world % 2:
            raise ValueError(f"{{world}} devices are not pairs")
        return world // 2

@frozen
class Cluster:
    capabilities = RuntimeCapabilities(least_devices={gpus})

class Giving(FakeRuntime):
    pass

@turnwise.hookimpl
def inference_backends():
    return [Implementation("paired", FakeBackend, Pairs)]

@turnwise.hookimpl
def runtimes():
    return [Implementation("giving", Giving, config=Cluster)]
"""
    there_are(monkeypatch, 8)
    paired = f"actor_infer.strategy_args={{strategy_name: paired, strategy_config: {{server: '{attached}'}}}}"
    got = found(toy(plugins=plugin(tmp_path, both)), "runtime=giving", paired).config
    line = (
        "$.actor_infer.device_mapping is missing: runtime 'giving' gives such a role 1 GPU, and 1 devices are not"
        " pairs. "
    )
    assert got == ([line + "Fix: other sizes, or other devices"] if refused else [])


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


def test_a_runtime_may_need_gpus_for_roles_without_device_mapping(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = """
from attrs import frozen
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.testing.fakes import FakeRuntime

@frozen
class Cluster:
    capabilities = RuntimeCapabilities(least_devices=1)

class OnGpus(FakeRuntime):
    pass

@turnwise.hookimpl
def runtimes():
    return [Implementation("on_gpus", OnGpus, config=Cluster)]
"""
    path = toy(plugins=plugin(tmp_path, runtime))
    there_are(monkeypatch, 0)
    needs = "{}: runtime 'on_gpus' gives a role without device_mapping 1 GPU, found 0. Fix: use devices that are here".format
    assert found(path, "runtime=on_gpus").machine == [needs("actor_train"), needs("actor_infer")]
    there_are(monkeypatch, 1)
    assert found(path, "runtime=on_gpus").machine == []


def test_an_engine_that_cannot_sleep_is_refused_on_devices_that_it_shares(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would end at the first update, after its first rollout."""
    awake = """
from attrs import frozen
from turnwise.contracts.inference import BackendCapabilities
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.testing.fakes import FakeBackend, FakeRuntime

@frozen
class Numbers:
    capabilities = RuntimeCapabilities(counts_devices=False)

class Sleepless(FakeBackend):
    capabilities = BackendCapabilities(cannot_sleep="it has insomnia. Fix: rest: true")

class Processes(FakeRuntime):
    pass

@turnwise.hookimpl
def inference_backends():
    return [Implementation("sleepless", Sleepless)]

@turnwise.hookimpl
def runtimes():
    return [Implementation("processes", Processes, config=Numbers)]
"""
    there_are(monkeypatch, 8)
    path = toy(plugins=plugin(tmp_path, awake))
    sleepless = "actor_infer.strategy_args={strategy_name: sleepless}"
    shared = ["actor_train.device_mapping=[1]", "actor_infer.device_mapping=[0, 1]"]
    line = only(found(path, sleepless, *shared).config)
    assert (
        line
        == "$.actor_infer.device_mapping: actor_train uses device 1 in turns with it, and it has insomnia. Fix: rest:"
        " true"
    )
    assert found(path, sleepless, "actor_train.device_mapping=[2]", shared[1]).config == []
    assert found(path, *shared).config == []
    assert not assembly.turns(load(path, ["runtime=processes", "actor_train.device_mapping=[2]", shared[1]]).config)
    assert (
        found(path, "runtime=processes", sleepless, *shared).config == []
    )  # there the numbers are no GPUs of this machine


def test_an_engine_that_takes_turns_is_told_so_where_it_is_built_and_the_user_too(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = """
from turnwise.contracts.inference import BackendCapabilities
from turnwise.testing.fakes import FakeBackend

class Ready(FakeBackend):
    capabilities = BackendCapabilities(sleeps_on_demand=True)

@turnwise.hookimpl
def inference_backends():
    return [Implementation("ready", Ready)]
"""
    there_are(monkeypatch, 4)
    path = toy(plugins=plugin(tmp_path, ready))
    ready_one = "actor_infer.strategy_args={strategy_name: ready}"

    def told(*overrides: str) -> tuple[bool, list[str]]:
        config = load(path, overrides).config
        return assembly.serve_plan(config, Path(), None).context.sleeps, device_problems.notes(config)

    shared = ["actor_train.device_mapping=[1]", "actor_infer.device_mapping=[0, 1]"]
    note = "$.actor_infer: shares device 1 with actor_train, so its engine is started to sleep while others work there"
    assert told(ready_one, *shared) == (True, [note])
    assert told(*shared) == (True, [])  # of another engine there is nothing to choose
    assert told(ready_one, "actor_train.device_mapping=[2]", shared[1]) == (False, [])


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
