"""A plugin outside the repository's own set: installed by pip into a fresh environment, found there by its entry point,
trained one step."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "third_party_env"


def run(cwd: Path, *command: str | Path) -> str:
    """The output of a command that ends well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that sees this one's packages (torch, the core, the plugins) and has the
    example installed."""
    home = tmp_path_factory.mktemp("stranger")
    venv.create(home / "venv", symlinks=True, with_pip=False)
    packages = next((home / "venv").glob("lib/python*/site-packages"))
    ours = [path for path in site.getsitepackages() if Path(path).is_dir()]
    # addsitedir also reads the .pth files there, by which the editable distributions are found
    (packages / "torch_of_the_other.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in ours), encoding="utf-8"
    )
    shutil.copytree(EXAMPLE, home / "example", ignore=shutil.ignore_patterns("__pycache__"))
    python = home / "venv" / "bin" / "python"
    run(
        home,
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        home / "example",
    )
    assert (packages / "number_line.py").is_file(), "pip installed the example somewhere else"
    return python.parent


@pytest.mark.slow
def test_a_stranger_is_listed_beside_the_plugins_of_the_repository(stranger: Path) -> None:
    rows = json.loads(run(stranger, stranger / "python", "-m", "turnwise.cli.main", "plugins", "--json"))
    found = [row for row in rows if row["name"] == "number_line"]
    assert [(row["kind"], row["distribution"], row["version"], row["status"]) for row in found] == [
        ("environment", "turnwise-number-line", "0.1.0", "ok")
    ]
    assert {"turnwise-hf", "turnwise-torch"} <= {row["distribution"] for row in rows}
    assert "number_line" not in run(stranger, sys.executable, "-m", "turnwise.cli.main", "plugins"), (
        "it was installed here too"
    )


@pytest.mark.slow
def test_a_stranger_passes_its_own_tests(stranger: Path) -> None:
    example = stranger.parent.parent / "example"
    assert "3 passed" in run(
        example, stranger / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests"
    )


@pytest.mark.slow
def test_a_stranger_trains_one_step(stranger: Path, tmp_path: Path) -> None:
    config = EXAMPLE / "train.yaml"
    run(
        tmp_path,
        stranger / "python",
        "-m",
        "turnwise.cli.main",
        "train",
        config,
        "max_steps=1",
        "eval_steps=0",
        "eval_at_end=false",
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "runs" / "number_line" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert any("policy/loss" in line for line in lines)
    assert list((tmp_path / "runs" / "number_line" / "checkpoints").glob("checkpoint-*"))


def test_the_readme_shows_what_the_files_say() -> None:
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code is not None
    namespace: dict[str, object] = {}
    exec(compile(code[1], "README.md", "exec"), namespace)
    shown, packaged = namespace["NumberLine"], runpy.run_path(str(EXAMPLE / "number_line.py"))["NumberLine"]
    for seed in range(10):
        one, other = shown(), packaged()  # type: ignore[operator]
        assert one.reset(seed=seed)[0] == other.reset(seed=seed)[0]
        for action in ("left", "nowhere", "left", "left"):
            first, second = one.step(action), other.step(action)
            assert first[:4] == second[:4]
            assert first[4]["success"] == second[4]["success"]
    toml = re.search(r"```toml\n(.*?)```", readme, re.DOTALL)
    assert toml is not None
    written = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    assert all(line in written for line in toml[1].splitlines())


def test_the_yaml_of_the_example_names_plugins_that_the_repository_has() -> None:
    named = yaml.safe_load((EXAMPLE / "train.yaml").read_text(encoding="utf-8"))["plugins"]
    ours = {f"turnwise-{path.parent.name}" for path in ROOT.glob("plugins/*/*/pyproject.toml")}
    assert set(named) - ours == {"turnwise-number-line"}
