"""What CI runs starts as on a fresh machine and is the same each time; pip keeps its settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKE = """\
#!{python}
import json, os, subprocess, sys, tempfile
from pathlib import Path
def pip(*arguments):
    command = [os.environ["PYTHON"], "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
places = {{name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}}
seen = {{name: sorted(str(at.relative_to(place)) for at in Path(place).rglob("*")) for name, place in places.items()}}
(Path.home() / "left").write_text("")
said = {{"make": sys.argv[1:], "places": places, "seen": seen}}
if "check" in sys.argv:
    said["pip"] = [pip("cache", "dir"), pip("config", "list")]
with open({log!r}, "a") as log:
    log.write(json.dumps(said) + "\\n")
sys.exit(sys.argv[1:] == {failing!r})
"""


def ci(place: Path, failing: list[str]) -> tuple[int, list[dict]]:
    """The exit code of `.ci/run` where the target `failing` fails, and what each call of `make` saw."""
    home, log, make = place / "home", place / "log", place / "bin" / "make"
    for folder in (home / ".config" / "pip", make.parent, place / "tmp"):
        folder.mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").write_text("[global]\ntimeout = 77\n", encoding="utf-8")
    (home / ".cache").mkdir()
    make.write_text(MAKE.format(python=sys.executable, log=str(log), failing=failing), encoding="utf-8")
    make.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "XDG_"))}
    path = os.pathsep.join((str(make.parent), os.environ["PATH"]))
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env=kept | {"HOME": str(home), "TMPDIR": str(place / "tmp"), "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def test_ci_sees_no_home_no_cache_and_no_temporary_file_leaves_none_and_pip_keeps_its_settings(tmp_path: Path) -> None:
    code, calls = ci(tmp_path, [])
    assert code == 0
    assert [call["make"] for call in calls] == [["check"], ["test"], ["test-engines", "ARGS=--short"]]
    assert calls[0]["seen"] == {"HOME": [".config", ".config/pip"], "XDG_CACHE_HOME": [], "TMPDIR": []}
    assert not any(Path(place).exists() for place in calls[0]["places"].values())
    assert list((tmp_path / "tmp").iterdir()) == []
    cache, settings = calls[0]["pip"]
    assert cache == str(tmp_path / "home" / ".cache" / "pip")
    assert "global.timeout='77'" in settings


def test_ci_ends_with_what_fails(tmp_path: Path) -> None:
    code, calls = ci(tmp_path, ["test"])
    assert code != 0
    assert [call["make"] for call in calls] == [["check"], ["test"]]
    assert list((tmp_path / "tmp").iterdir()) == []


PROPERTY = """\
import pathlib, sys
from hypothesis import given, strategies as st

def test_before():
    pathlib.Path("drawn").write_text("")

@given(st.integers(0, 10**9))
def test_any_number(number):
    with open("drawn", "a") as drawn:
        drawn.write(f"{number}\\n")
"""


def drawn(place: Path, *arguments: str) -> list[str]:
    """The examples of a property test under this repository's settings."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    ours = ["-c", ROOT / "pyproject.toml", "-p", "conftest", "--rootdir", place]
    command = [sys.executable, "-m", "pytest", *ours, *arguments, place]
    subprocess.run(command, cwd=place, env=env, capture_output=True, timeout=60, check=True)
    return (place / "drawn").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_property_tests_draw_the_same_examples_each_time_and_others_to_explore(tmp_path: Path) -> None:
    (tmp_path / "test_property.py").write_text(PROPERTY, encoding="utf-8")
    first, explored = drawn(tmp_path), drawn(tmp_path, "--hypothesis-profile", "explore")
    assert drawn(tmp_path) == first
    assert not set(explored) <= set(first)
    assert len(explored) > 5 * len(first)
    assert drawn(tmp_path, "--hypothesis-profile", "explore") != explored
