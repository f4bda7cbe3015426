"""Devices before a run: those that are missing, that roles share, and that an engine or a runtime cannot use so."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from toy_runs import PAIRED, Toy, found, loaded, only, plugin, runtimes, there_are

from turnwise.config.loader import load
from turnwise.planning import assembly, device_problems
from turnwise.planning.preflight import Findings
from turnwise.testing.compare import says


def test_devices_that_are_not_there_are_the_machines_lack(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, 1)
    path = toy()
    config = loaded(path)
    for mapping, expected in (
        ((0,), []),
        ((1,), ["actor_infer: device_mapping needs 2 GPUs, found 1"]),
    ):
        got = found(path, actor_infer=evolve(config.actor_infer, device_mapping=mapping))
        assert got.config == [] and [line.split(". Fix: ")[0] for line in got.machine] == expected
    there_are(monkeypatch, 0)
    line = only(found(path, actor_infer=evolve(config.actor_infer, device_mapping=(0,))).machine)
    says(line, "actor_infer", "device_mapping", "needs 1 GPU", "found 0", "Fix: use devices that are here")


def test_fewer_devices_than_the_run_expects_are_the_machines_lack(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, 2)
    assert found(toy(), "num_gpus_per_node=2") == Findings([], [])
    got = found(toy(), "num_gpus_per_node=8")
    assert got.config == []
    says(only(got.machine), "num_gpus_per_node", "8 GPUs", "found 2", "Fix: the number there is")


def test_devices_of_a_runtime_that_has_its_own_are_not_counted_here(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = 'Implementation("lacking", "nowhere:Runtime", config=elsewhere_options, requires=("nowhere",))'
    there_are(monkeypatch, 0)
    path = toy(plugins=plugin(tmp_path, runtimes({"elsewhere": "counts_devices=False"}, lacking)))
    mapping = ["actor_train.device_mapping=[0, 1]", "actor_infer.device_mapping=[2]"]
    assert found(path, "runtime=elsewhere", *mapping, "num_gpus_per_node=8").machine == []
    assert "GPU" not in only(
        found(path, "runtime=lacking", *mapping).machine
    )  # what is not installed is reported, and nothing of GPUs
    of_training, of_sampling = found(path, *mapping).machine
    says(of_training, "actor_train", "needs 2 GPUs", "found 0", "Fix: ")
    says(of_sampling, "actor_infer", "needs 3 GPUs", "found 0", "Fix: ")


def test_several_training_processes_need_a_runtime_of_several(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, 2)
    line = only(found(toy(runtime="local"), "actor_train.device_mapping=[0, 1]").config)
    says(
        line, "$.actor_train.device_mapping", "2 devices", "'local' has one process", "Fix: runtime: ray; or one device"
    )
    assert found(toy(), "actor_infer.device_mapping=[0, 1]") == Findings([], [])


def test_the_one_runtime_of_several_processes_is_chosen_where_a_role_has_several_devices_and_none_is_named(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_are(monkeypatch, 2)
    several = "actor_train.device_mapping=[0, 1]"
    path = toy(plugins=["no:turnwise-ray", *plugin(tmp_path, runtimes({"spread": ""}))])
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
    path = toy(plugins=plugin(tmp_path, runtimes({"spread": "", "crowd": ""})))
    line = only(found(path, "actor_train.device_mapping=[0, 1]").config)
    assert line.endswith("runtime 'local' has one process. Fix: runtime: crowd or ray or spread; or one device")


def test_devices_that_an_engine_cannot_divide_are_found_before_anything_starts(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine's own check does not speak of them."""
    there_are(monkeypatch, 8)
    path = toy(plugins=plugin(tmp_path, PAIRED))
    paired = "actor_infer.strategy_args={strategy_name: paired}"
    line = only(found(path, paired, "actor_infer.device_mapping=[0, 1, 2]").config)
    says(line, "$.actor_infer.device_mapping", "3 devices are not pairs", "Fix: other sizes, or other devices")
    assert found(path, paired, "actor_infer.device_mapping=[0, 1]").config == []


@pytest.mark.parametrize(
    ("gpus", "attached", "refused"), [(1, "", True), (2, "", False), (0, "", False), (1, "http://there", False)]
)
def test_an_engine_without_devices_must_fit_into_those_that_the_runtime_gives_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, attached: str, refused: bool
) -> None:
    """Without GPUs it starts as many processes as it likes, and a server that runs already has its own."""
    both = PAIRED + runtimes({"giving": f"least_devices={gpus}"})
    there_are(monkeypatch, 8)
    paired = f"actor_infer.strategy_args={{strategy_name: paired, strategy_config: {{server: '{attached}'}}}}"
    got = found(toy(plugins=plugin(tmp_path, both)), "runtime=giving", paired).config
    assert len(got) == refused
    for line in got:
        says(line, "$.actor_infer.device_mapping is missing", "'giving'", "1 devices are not pairs", "Fix: other sizes")


def test_a_runtime_may_need_gpus_for_roles_without_device_mapping(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toy(plugins=plugin(tmp_path, runtimes({"on_gpus": "least_devices=1"})))
    there_are(monkeypatch, 0)
    for role, line in zip(("actor_train", "actor_infer"), found(path, "runtime=on_gpus").machine, strict=True):
        says(line, role, "'on_gpus'", "without device_mapping", "found 0", "Fix: use devices that are here")
    there_are(monkeypatch, 1)
    assert found(path, "runtime=on_gpus").machine == []


def test_an_engine_that_cannot_sleep_is_refused_on_devices_that_it_shares(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would end at the first update, after its first rollout."""
    awake = """
from turnwise.contracts.inference import BackendCapabilities
from turnwise.testing.fakes import FakeBackend

class Sleepless(FakeBackend):
    capabilities = BackendCapabilities(cannot_sleep="it has insomnia. Fix: rest: true")

@turnwise.hookimpl
def inference_backends():
    return [Implementation("sleepless", Sleepless)]
"""
    awake += runtimes({"processes": "counts_devices=False"})
    there_are(monkeypatch, 8)
    path = toy(plugins=plugin(tmp_path, awake))
    sleepless = "actor_infer.strategy_args={strategy_name: sleepless}"
    shared = ["actor_train.device_mapping=[1]", "actor_infer.device_mapping=[0, 1]"]
    line = only(found(path, sleepless, *shared).config)
    says(line, "$.actor_infer.device_mapping", "actor_train", "device 1", "it has insomnia. Fix: rest: true")
    assert found(path, sleepless, "actor_train.device_mapping=[2]", shared[1]).config == []
    assert found(path, *shared).config == []
    assert not assembly.turns(load(path, ["runtime=processes", "actor_train.device_mapping=[2]", shared[1]]).config)
    assert (
        found(path, "runtime=processes", sleepless, *shared).config == []
    )  # there the numbers are no GPUs of this machine


def test_an_engine_that_takes_turns_knows_it_where_it_is_built_and_so_does_the_user(
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

    def turns_of(*overrides: str) -> tuple[bool, list[str]]:
        config = load(path, overrides).config
        return assembly.serve_plan(config, Path(), None).context.sleeps, device_problems.notes(config)

    shared = ["actor_train.device_mapping=[1]", "actor_infer.device_mapping=[0, 1]"]
    note = "$.actor_infer: shares device 1 with actor_train, so its engine is started to sleep while others work there"
    assert turns_of(ready_one, *shared) == (True, [note])
    assert turns_of(*shared) == (True, [])  # of another engine there is nothing to choose
    assert turns_of(ready_one, "actor_train.device_mapping=[2]", shared[1]) == (False, [])
