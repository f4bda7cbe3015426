"""`turnwise new`: for every kind a distribution whose own tests pass, whose implementation a registry finds, and whose
example trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from turnwise.cli.main import main
from turnwise.cli.new import TEMPLATES, resolve, scaffold
from turnwise.errors import ConfigError, MachineError
from turnwise.hookspecs import KINDS
from turnwise.plugins import Registry


def python(folder: Path, *arguments: str) -> str:
    """Run a Python in the distribution's folder with its sources on the path; its output, after it ended well."""
    path = os.pathsep.join(
        filter(None, (str(folder / "src"), os.environ.get("PYTHONPATH")))
    )  # Turnwise itself may be there, not installed
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def new(kind: str, into: Path, name: str = "my-first_one") -> Path:
    scaffold(kind, name, into)
    return into / "turnwise-my-first-one"


@pytest.mark.parametrize("kind", sorted(KINDS.values()))
def test_a_scaffolded_plugin_passes_its_own_tests(kind: str, tmp_path: Path) -> None:
    output = python(new(kind, tmp_path), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error")
    assert re.search(r"\b[2-9] passed", output)
    assert "skipped" not in output.splitlines()[-1]


@pytest.mark.parametrize("kind", sorted(KINDS.values()))
def test_a_registry_finds_the_scaffolded_implementation(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"found_{kind}"
    scaffold(kind, name, tmp_path)
    folder = tmp_path / f"turnwise-{name.replace('_', '-')}"
    monkeypatch.syspath_prepend(folder / "src")
    known = Registry.discover()
    known.declare([f"turnwise_{name}"])
    entry = known.find(kind, name)
    assert entry.status == "ok"
    assert entry.implementation.summary
    assert isinstance(entry.target(), type)
    if entry.implementation.config is not None:
        entry.config_class()()  # every option has a default


def test_the_examples_train_on_the_fakes(tmp_path: Path) -> None:
    kinds = [kind for kind, template in TEMPLATES.items() if template.example]
    script = ["import sys", "from turnwise.cli.main import main"]
    for kind in kinds:  # all in one process: starting one is what takes the time
        scaffold(kind, f"ex_{kind}", tmp_path)
        folder = tmp_path / f"turnwise-ex-{kind.replace('_', '-')}"
        text = (folder / "example.yaml").read_text(encoding="utf-8")
        (folder / "local.yaml").write_text(
            text.replace(f"{folder.name},", f"turnwise_ex_{kind},"), encoding="utf-8"
        )  # it is not installed
        arguments = [
            "train",
            str(folder / "local.yaml"),
            "max_steps=2",
            "eval_steps=2",
            f"output_dir={tmp_path / 'runs' / kind}",
        ]
        script += [f"sys.path.append({str(folder / 'src')!r})", f"main({arguments!r}, standalone_mode=False)"]
    python(tmp_path, "-c", "\n".join(script))
    for kind in kinds:
        assert list((tmp_path / "runs" / kind / "checkpoints").glob("checkpoint-*")), (
            f"the example of {kind} saved nothing"
        )


def test_nothing_is_left_to_fill_in(tmp_path: Path) -> None:
    for kind in KINDS.values():
        folder = new(kind, tmp_path / kind)
        for path in [p for p in folder.rglob("*") if p.is_file()]:
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\{\{\w+\}\}", text), f"{path} holds a placeholder"
        made = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert made >= {
            "pyproject.toml",
            "README.md",
            "tests/test_my_first_one.py",
            "src/turnwise_my_first_one/__init__.py",
        }
        tests = (folder / "tests" / "test_my_first_one.py").read_text(encoding="utf-8")
        assert re.search(rf'run_conformance\("my_first_one", "{kind}", strict=True\) == 0', tests)
        facts = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        assert facts["project"]["entry-points"]["turnwise"] == {"my_first_one": "turnwise_my_first_one"}


def test_scaffolded_code_is_clean(tmp_path: Path) -> None:
    rules = ["--select=E,F,W,I,UP,B,SIM,RUF,PT", "--ignore=RUF001,RUF002,RUF003"]
    for kind in KINDS.values():
        folder = new(kind, tmp_path / kind)
        for command in (["check", *rules], ["format", "--check"]):
            python(folder, "-m", "ruff", *command, "--isolated", "--no-cache", "--line-length=120", ".")


def test_every_hook_has_a_template() -> None:
    assert set(TEMPLATES) == set(KINDS.values())
    assert {resolve(template.short) for template in TEMPLATES.values()} == set(KINDS.values())
    assert resolve("Batch_Adjust") == resolve("batch-adjust") == "batch_adjust"


def test_a_misspelt_kind_is_reported_with_the_nearest_and_all(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"'estimater'\. Did you mean 'estimator'\? Kinds: backend, batch-adjust, env, .*strategy\. Fix: one of them$",
    ):
        scaffold("estimater", "mine", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "1st", "a b", "a/b", "../up", "naïve", "a--b", "-a", "a_", "a.b"])
def test_a_name_that_cannot_name_a_package_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot name a package"):
        scaffold("env", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "turnwise-mine").mkdir()
    with pytest.raises(ConfigError, match="exists already and is left as it is"):
        scaffold("env", "mine", tmp_path)
    assert list((tmp_path / "turnwise-mine").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(MachineError, match="cannot write"):
        scaffold("env", "mine", tmp_path / "file")


def test_the_command_says_what_to_do_next(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["new", "estimator", "Last-Step", "--into", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[1:] == [
        f"  pip install -e {tmp_path / 'turnwise-last-step'}",
        "  turnwise test-plugin last_step",
        "  in your YAML: plugins: [turnwise-last-step] and adv_estimator: last_step",
    ]
    again = CliRunner().invoke(main, ["new", "estimator", "last_step", "--into", str(tmp_path)])
    assert again.exit_code == 2
    assert again.output.startswith("error: ")
    assert again.output.count("\n") == 1
