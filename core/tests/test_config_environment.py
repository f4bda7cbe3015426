"""`${…}` that names through another one, and what the environment gives: used, and never written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.config import Loaded, load
from turnwise.errors import ConfigError
from turnwise.plugins import Registry

Run = Callable[..., Loaded]
SECRET = "sk-0123456789"


@pytest.mark.parametrize("value", ["${vars.n.${exp_name}}", "x-${vars.${exp_name}}", "${vars.n[${exp_name}]}"])
def test_a_name_made_of_another_value_that_is_not_there_is_reported(run_yaml: Run, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml(f"vars: {{n: {{a: 1}}}}\nexp_name: x\nlogging_dir: '{value}'\n")
    (line,) = caught.value.problems
    assert line.startswith("run.yaml:18: $.logging_dir: ")
    assert "Fix: define the key" in line


def test_a_name_made_of_another_value_is_resolved(run_yaml: Run) -> None:
    config = run_yaml(
        "vars: {n: {a: logs}, k: a}\nlogging_dir: '${vars.n.${vars.k}}/${vars.${.vars.k2}}'\n", "vars.k2=k"
    ).config
    assert config.logging_dir == "logs/a"


def test_what_copies_a_mistake_is_not_blamed_for_it(run_yaml: Run) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("vars: {a: '${nope}', b: '${vars.a}', c: {d: '${vars.b}'}, e: '${vars.c}'}\n")
    (line,) = caught.value.problems
    assert "$.vars.a: '${nope}' cannot be resolved" in line


FROM_ENVIRONMENT = """\
vars: {key: '${oc.env:TW_SECRET}', both: 'k=${vars.key}', block: {token: '${vars.key}', n: '${oc.decode:${oc.env:TW_NUMBER}}'}}
system_envs: {A_KEY: '${vars.key}', PLAIN: text}
logging_dir: 'logs/${vars.both}'
render_episodes: '${oc.decode:${oc.env:TW_NUMBER}}'
track_with: [{use: wall, height: '${vars.block.n}'}, {use: jsonl, folder: '${vars.key}'}]
rollout_mock: {dump_dir: '${vars.${oc.env:TW_NAME}}'}
"""


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_SECRET", SECRET)
    monkeypatch.setenv("TW_NUMBER", "12345678")
    monkeypatch.setenv("TW_NAME", "key")


@pytest.mark.usefixtures("secret")
def test_a_value_of_the_environment_is_used_and_its_reference_written(
    run_yaml: Run, tmp_path: Path, fake_registry: Registry
) -> None:
    loaded = run_yaml(FROM_ENVIRONMENT)
    config = loaded.config
    assert config.actor_train.system_envs == {"A_KEY": SECRET, "PLAIN": "text"}
    assert (config.logging_dir, config.render_episodes, config.rollout_mock.dump_dir) == (
        f"logs/k={SECRET}",
        12345678,
        SECRET,
    )
    written = loaded.plain()
    assert SECRET not in json.dumps(written)
    assert "12345678" not in json.dumps(written)
    reference = "${oc.env:TW_SECRET}"
    assert written["vars"]["block"] == {"token": reference, "n": "${oc.decode:${oc.env:TW_NUMBER}}"}
    assert written["actor_infer"]["system_envs"] == {"A_KEY": reference, "PLAIN": "text"}
    assert written["logging_dir"] == f"logs/k={reference}"
    assert written["rollout_mock"]["dump_dir"] == "${vars.${oc.env:TW_NAME}}"
    assert written["track_with"][1] == {"use": "jsonl", "folder": reference, "every": 1}
    assert SECRET not in loaded.text
    (tmp_path / "again.yaml").write_text(loaded.text)
    again = load(tmp_path / "again.yaml", registry=fake_registry)
    assert again.config == config
    assert again.plain()["vars"] == written["vars"]


@pytest.mark.usefixtures("secret")
def test_a_copied_block_keeps_the_references_inside(run_yaml: Run) -> None:
    written = run_yaml(
        "vars: {block: {deep: ['${oc.env:TW_SECRET}']}, copy: '${vars.block}', again: '${vars.copy.deep}'}\n"
    ).plain()
    assert written["vars"]["copy"] == {"deep": ["${oc.env:TW_SECRET}"]}
    assert written["vars"]["again"] == ["${oc.env:TW_SECRET}"]


@pytest.mark.usefixtures("secret")
def test_a_line_about_a_value_of_the_environment_names_the_reference(run_yaml: Run) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("seed: ${oc.env:TW_SECRET}\n")
    assert caught.value.problems[0].startswith(
        "run.yaml:16: $.seed: '${oc.env:TW_SECRET}' is text, a whole number is needed."
    )
