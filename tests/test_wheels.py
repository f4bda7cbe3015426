"""`make wheels` builds every distribution, and pip installs one with its siblings from them alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = [
    tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for path in (ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("plugins/*/*/pyproject.toml")))
]
NAMES = {project["name"] for project in PROJECTS}
pytestmark = pytest.mark.slow


def run(*command: str | Path) -> str:
    """What a command prints that knows nothing of the sources here."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels, made by this interpreter's environment as it is."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    folder = tmp_path_factory.mktemp("dist")
    (folder / "turnwise_gone-0.0.1-py3-none-any.whl").touch()
    run("make", "wheels", "-o", f"{sys.prefix}/.ready", f"VENV={sys.prefix}", f"DIST={folder}")
    return folder


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The interpreter of a new environment that has the third parties of this one, and nothing of Turnwise."""
    venv.create(tmp_path / "fresh", with_pip=False, symlinks=True)
    place = tmp_path / "fresh"
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place), "platbase": str(place)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "turnwise" not in entry.name and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    return place / "bin" / "python"


def install(python: Path, dist: Path, *names: str) -> dict[str, Path]:
    """Install as the READMEs say, without an index; the distributions of Turnwise that are there then, and their
    folders."""
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--find-links", dist, *names)
    code = (
        "import json\nfrom importlib.metadata import distributions\nprint(json.dumps({d.name: str(d.locate_file(''))"
        " for d in distributions()}))"
    )
    found = json.loads(run(python, "-c", code))
    return {name: Path(place) for name, place in found.items() if name.startswith("turnwise")}


def test_every_distribution_is_a_wheel_and_no_older_one_stays(dist: Path) -> None:
    built = [re.sub("_", "-", wheel.name.partition("-")[0]) for wheel in dist.iterdir()]
    assert sorted(built) == sorted(NAMES)


def test_pip_finds_the_siblings_of_a_distribution(dist: Path, fresh: Path) -> None:
    came = install(fresh, dist, "turnwise-gigpo", "turnwise-vllm")
    assert set(came) == {"turnwise-gigpo", "turnwise-vllm", "turnwise", "turnwise-torch", "turnwise-serving"}
    assert all(place.is_relative_to(fresh.parent.parent) for place in came.values())
    plugins = json.loads(run(fresh.with_name("turnwise"), "plugins", "--json"))
    assert {"gigpo", "vllm"} <= {entry["name"] for entry in plugins}


def test_what_the_readme_installs_elsewhere_is_all_that_its_example_names(dist: Path, fresh: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = re.findall(r"^pip install --find-links dist (.*)$", readme, re.MULTILINE)
    install(fresh, dist, *line.partition("#")[0].split())
    planned = run(fresh.with_name("turnwise"), "plan", ROOT / "examples" / "frozen_lake.yaml")
    assert "16 groups × 16 = 256 trajectories a step" in planned


def test_whatever_is_installed_from_wheels_is_complete(dist: Path, fresh: Path) -> None:
    assert set(install(fresh, dist, *NAMES)) == NAMES
    plugins = json.loads(run(fresh.with_name("turnwise"), "plugins", "--json"))
    owners = {project["name"] for project in PROJECTS if "turnwise" in project.get("entry-points", {})}
    assert {entry["distribution"] for entry in plugins} == owners
    planned = run(fresh.with_name("turnwise"), "plan", ROOT / "examples" / "frozen_lake.yaml")
    assert "16 groups × 16 = 256 trajectories a step" in planned
    run(fresh.with_name("turnwise"), "new", "env", "my-game", "--into", fresh.parent)  # its templates came along
    # What errors say where the package of an extra is missing and its distribution is there, which no index is asked
    # for.
    extras = ("turnwise-torch[lora]", "turnwise[testing]")
    run(sys.executable, "-m", "pip", "--python", fresh, "install", "--no-index", *extras)
