"""Broken model folders: `python tests/broken_models.py` names each as `pretrain` for `check` and `train`, and prints what
should not be.

Each is a tiny model's folder of which one thing was broken. The answer is a line that names the folder and the fix
before anything is trained, never a traceback, a success that is none, or a hang."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from broken_files import Broken, files, said
from broken_weights import weighed
from judged import empty, faults_of, judge_all, run

from turnwise.testing.runs import LAKE, written
from turnwise_hf.config import recipe_from
from turnwise_hf.recipe import prepare_recipe

NAME = "model-under-test"
RECIPE = {
    "recipe": {
        "architecture": "qwen2",
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "vocab_size": 400,
        "tokenizer": "byte_bpe",
    }
}


def broken() -> Iterator[Broken]:
    """All of them."""
    yield Broken("nothing", lambda folder: None, fine=True)
    yield from files()
    yield from said()
    yield from weighed()


def whole(cache: Path) -> Path:
    """A model folder of which nothing is broken."""
    texts = [{"role": "user", "content": "a lake of ice and holes, the goal is up, down, left or right"}]
    return prepare_recipe(recipe_from(RECIPE), texts, 0, cache)


def judge(one: Broken, model: Path) -> list[str]:
    """What should not be, of a folder in the current folder, which is left empty. `model`: a whole one."""
    folder = Path(NAME)
    shutil.copytree(model, folder)
    one.breaks(folder)
    Path("run.yaml").write_text(written(LAKE, {"pretrain": f"./{NAME}", "max_steps": 1, "save_steps": 0}))
    try:
        results = {"check": run(["check", "run.yaml"])}
        if results["check"].code == 0:
            results["train"] = run(["train", "run.yaml"])
        faults = [fault for command, result in results.items() for fault in faults_of(command, result, NAME)]
        if one.fine == any(result.code for result in results.values()):
            faults.append(f"refused: {results}" if one.fine else "success, and it is wrong")
        if not one.fine and Path("out/metrics.jsonl").is_file() and Path("out/metrics.jsonl").read_text():
            faults.append("it trained before it was refused")
        return faults
    finally:
        empty()


def main_by_hand() -> int:
    """Judge all, print every fault; how many have one."""
    with tempfile.TemporaryDirectory() as folder:
        return judge_all("model folders", broken(), partial(judge, model=whole(Path(folder) / "model")))


if __name__ == "__main__":
    sys.exit(1 if main_by_hand() else 0)
