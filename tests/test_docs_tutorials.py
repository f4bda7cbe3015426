"""The tutorials are true: who copies their blocks plays, trains and tests."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, blocks, turnwise


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
