"""The YAMLs of the plugins' READMEs: all keys exist, and the first of every engine trains on a CPU machine.
Turnwise-openai runs its own."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from turnwise.config import load

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
READMES = sorted(PLUGINS.glob("*/*/README.md"))
SGLANG = os.environ.get("TURNWISE_SGLANG_PYTHON", "")
Make = Callable[[str], Any]


def examples(readme: Path) -> list[str]:
    """The YAMLs of a README."""
    return re.findall(r"^```yaml\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def example(name: str) -> str:
    """The first YAML of an engine's README."""
    return examples(PLUGINS / "strategies" / name / "README.md")[0]


@pytest.mark.parametrize("readme", [path for path in READMES if examples(path)], ids=lambda path: path.parent.name)
def test_every_key_of_a_readme_exists(readme: Path, lake: Any) -> None:
    """Parts of a configuration are put into a whole one."""
    whole = OmegaConf.merge(
        OmegaConf.load(lake.yaml), {"rollout_batch_size": 64, "train_env_manager": {"num_env_groups": 16}}
    )
    for text in examples(readme):
        block = OmegaConf.create(text)
        OmegaConf.save(block if "max_steps" in block else OmegaConf.merge(whole, block, {"plugins": []}), lake.yaml)
        loaded = load(lake.yaml, planning=True)
        assert loaded.warnings == []


@pytest.mark.parametrize("name", ["hf", "torch", "deepspeed", "megatron", "vllm", "sglang", "ray"])
def test_nothing_is_wrong_in_an_example(name: str, make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = make_run(example(name)).command("check", "run.yaml")
    assert [line for line in done.stderr.splitlines() if not line.startswith("machine: ")] == []
    assert done.exit_code == (3 if done.stderr else 0)


@pytest.mark.parametrize("gpus", [2, 3])
def test_the_command_for_two_gpus_leaves_nothing_to_write(
    gpus: int, lake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of two the sampler takes turns with the trainer, of three it has its own."""
    text = (PLUGINS.parent / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^turnwise train run\.yaml (.*device_mapping.*)$", text, re.MULTILINE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    done = lake.command("check", "run.yaml", *shlex.split(command))
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith(("machine: ", "note: "))] == []
    # Packages that this environment lacks, or has for CPUs: what else a machine can lack is there.
    machine = [line for line in lines if line.startswith("machine: ")]
    assert all(re.search("not installed|build for CPUs is installed", line) for line in machine), machine
    assert done.exit_code == (3 if machine else 0)
    notes = " ".join(lines)
    assert "so runtime 'ray' is chosen" in notes
    assert ("shares device 0 with actor_train" in notes) is (gpus == 2)


SMALL = (
    "output_dir=out", "max_steps=2", "eval_steps=2", "recompute_old_logprobs=true",
    "val_env_manager={num_env_groups: 4, group_size: 1, tags: [FrozenLake]}",
)  # fmt: skip


def assert_trained(run: Any) -> None:
    """Two steps and two evaluations; sampler and trainer have the same weights before and after the first update, which
    moved them."""
    lines = run.metrics()
    trained = [line for line in lines if "policy/grad_norm" in line]
    assert [line["step"] for line in trained] == [0, 1]
    for line in trained:
        assert line["policy/grad_norm"] > 0
        assert line["correction/log_prob_diff/max"] < 1e-4
        assert line["rollout/env_failures"] == 0
    assert len([line for line in lines if "val/success" in line]) == 2


@pytest.mark.parametrize("name", ["hf", "torch"])
def test_an_example_without_an_engine_runs(name: str, make_run: Make) -> None:
    run = make_run(example(name))
    run.train(*SMALL)
    assert_trained(run)


def real(name: str, here: bool, *more: Any) -> Any:
    return pytest.param(
        name, marks=[pytest.mark.engines, pytest.mark.skipif(not here, reason=f"{name} is not installed"), *more]
    )


@pytest.mark.parametrize(
    "name",
    [
        *(real(name, find_spec(name) is not None) for name in ("deepspeed", "megatron", "vllm")),
        real("sglang", bool(SGLANG)),
        real("ray", find_spec("ray") is not None, pytest.mark.matrix),
    ],
)
def test_an_example_of_an_engine_runs(name: str, make_run: Make) -> None:
    run = make_run(example(name))
    if name == "sglang":
        (run.folder / "V").symlink_to(Path(SGLANG).parent.parent)  # the environment of the README's install line
    memory = ["runtime.object_store_mb=100"] if name == "ray" else []
    done = run.process("train", "run.yaml", *SMALL, *memory, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_trained(run)


def test_what_a_page_installs_of_turnwise_comes_from_wheels_or_folders() -> None:
    """No package index has it. An extra of what is installed (`turnwise-torch[lora]`) needs neither, in a sentence
    about it."""
    root = PLUGINS.parent
    pages = [root / "README.md", *READMES, *sorted((root / "docs").rglob("*.md"))]
    for page in pages:
        for line in re.findall(r"^ *pip install.*turnwise.*$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert "--find-links dist " in line or " -e " in line or "./" in line, f"{page}: {line}"
