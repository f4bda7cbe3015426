"""Damaged checkpoints: `python tests/damaged_checkpoints.py` resumes a run from each, and prints what should not be.

Each is the newest of a short run of which one thing was damaged. The answer is a line that names the checkpoint and the
fix, or, where nothing that counts was touched, the very metrics of the run that goes on from the whole one. Never a
traceback, a success that is none, or a hang."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen
from judged import current, empty, faults_of, judge_all, run

from turnwise.testing.runs import LAKE, written

NEWEST, OLDER, MANIFEST = "checkpoint-000003", "checkpoint-000002", "manifest.json"
CONFIG = written(
    LAKE,
    {
        "plugins": [*LAKE["plugins"], "turnwise-gae"],
        "adv_estimator": "gae",
        "critic": {"training_args": {"learning_rate": 0.03, "per_device_train_batch_size": 4}},
    },
)
TRAIN = ("train", "run.yaml", "max_steps=3")
RESUME = ("train", "run.yaml", "max_steps=4", "resume_from_checkpoint=true")
FILES = (
    "actor_train/state.safetensors",
    "critic/state.safetensors",
    "model/config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "model/chat_template.jinja",
    MANIFEST,
)


@frozen
class Damaged:
    """A checkpoint: what is done to a whole one. `harmless`: True where the run has to go on, None where it may."""

    name: str
    harms: Callable[[Path], object]
    harmless: bool | None = False


# ---------------------------------------------------------------- the files


def _flipped(name: str, seed: int, folder: Path) -> None:
    """One bit of a file."""
    content = bytearray((folder / name).read_bytes())
    bit = random.Random(f"{name} {seed}").randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)


def _cut(name: str, share: float, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(share * len(content))])


def _lengthened(name: str, folder: Path) -> None:
    with (folder / name).open("ab") as file:
        file.write(b"}")


def _zeros(name: str, folder: Path) -> None:
    """As a file system leaves what it had no time to write."""
    (folder / name).write_bytes(bytes((folder / name).stat().st_size))


def _taken(name: str, source: str, folder: Path) -> None:
    """The file is that of another checkpoint, or of another role."""
    shutil.copy(folder / source, folder / name)


def _made_folder(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def _files() -> Iterator[Damaged]:
    for name in FILES:
        for seed in range(20 if name == MANIFEST else 3):
            # White space between two keys is not what was said.
            yield Damaged(
                f"{name}: a bit flipped, {seed}",
                partial(_flipped, name, seed),
                None if name == MANIFEST else False,
            )
        yield Damaged(f"{name}: missing", lambda folder, name=name: (folder / name).unlink())
        yield Damaged(f"{name}: empty", partial(_cut, name, 0))
        yield Damaged(f"{name}: half of it", partial(_cut, name, 0.5))
        yield Damaged(f"{name}: a byte less", partial(_cut, name, 0.9999))
        yield Damaged(f"{name}: a byte more", partial(_lengthened, name))
        yield Damaged(f"{name}: zeros", partial(_zeros, name))
        yield Damaged(f"{name}: a folder", partial(_made_folder, name))
        if not name.startswith("model/") or name.endswith("model.safetensors"):  # the others never change
            yield Damaged(f"{name}: of another step", partial(_taken, name, f"../{OLDER}/{name}"))
    actor, critic = FILES[:2]
    yield Damaged("the critic's state as the actor's", partial(_taken, actor, critic))
    yield Damaged("the actor's state as the critic's", partial(_taken, critic, actor))


# ---------------------------------------------------------------- the manifest


def _manifest(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """The manifest, changed by whoever does not know its digest."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def _signed(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """The manifest as another version would have written it: whole, with a digest or without one."""

    def all_of(content: dict[str, Any]) -> None:
        content.pop("sha256", None)
        change(content)

    _manifest(all_of, folder)


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """The key of a path set, or left out where the value is `...`."""

    def change(content: dict[str, Any]) -> None:
        *above, last = path.split(" ")
        for name in above:
            content = content[name]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return change


def _entry(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["files"][FILES[0]].update(values)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another step": _set("step", 2),
    "another KL coefficient": _set("state kl_coef", 0.5),
    "a file less": _set(f"files {FILES[0]}", ...),
}
"""What a digest alone shows."""
VERSIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no step": _set("step", ...),
    "a step that is text": _set("step", "third"),
    "step -1": _set("step", -1),
    "step 2": _set("step", 2),
    "step 10⁹": _set("step", 10**9),
    "no state": _set("state", ...),
    "a state that is null": _set("state", None),
    "a state that is a list": _set("state", [1]),
    "no KL coefficient": _set("state kl_coef", ...),
    "a KL coefficient that is text": _set("state kl_coef", "high"),
    "a KL coefficient that is NaN": _set("state kl_coef", float("nan")),
    "no scheduler": _set("state scheduler", ...),
    "a scheduler that is a number": _set("state scheduler", 3),
    "a queue that is text": _set("state scheduler", {"queue": "x"}),
    "a queue of numbers": _set("state scheduler", {"queue": [1]}),
    "a queue of empty groups": _set("state scheduler", {"queue": [{}]}),
    "no history": _set("state history", ...),
    "a history that is a list": _set("state history", []),
    "a history without evaluations": _set("state history evaluations", ...),
    "evaluations that are a number": _set("state history evaluations", 3),
    "last metrics that are text": _set("state history last", "x"),
    "reporting that is a number": _set("state reporting", 3),
    "a configuration that is a number": _set("state config", 3),
    "no files": _set("files", ...),
    "files that are a list": _set("files", []),
    "no file at all": _set("files", {}),
    "a file without its size": _set(f"files {FILES[0]} size", ...),
    "a size that is text": _entry(size="large"),
    "another size": _entry(size=3),
    "a digest that is a number": _entry(sha256=3),
    "another digest": _entry(sha256="0" * 64),
    "a file outside": lambda content: content["files"].update({"../../../run.yaml": {"size": 1, "sha256": "0"}}),
}
TEXTS = {"null": "null", "a list": "[]", "a number": "3", "deep": "[" * 100_000, "no UTF-8": "\udcff"}


def _text(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(text.encode("utf-8", "surrogateescape"))


# ---------------------------------------------------------------- the folder


def _swapped(folder: Path) -> None:
    """Two checkpoints under each other's name."""
    folder.rename(folder.with_name("x"))
    folder.with_name(OLDER).rename(folder)
    folder.with_name("x").rename(folder.with_name(OLDER))


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _looped(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    (folder / "model").symlink_to(folder / "model")


def _stray(name: str, content: str, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)


def damaged() -> Iterator[Damaged]:
    """All of them."""
    yield Damaged("nothing", lambda folder: None, harmless=True)
    yield from _files()
    for name, change in CHANGES.items():
        yield Damaged(f"the manifest with {name}", partial(_manifest, change))
    for name, change in VERSIONS.items():
        yield Damaged(f"a manifest of another version: {name}", partial(_signed, change))
    for name, text in TEXTS.items():
        yield Damaged(f"a manifest that is {name}", partial(_text, text))
    yield Damaged("two checkpoints swapped", _swapped)
    yield Damaged("an empty folder", _emptied)
    yield Damaged("a model folder that is a link to itself", _looped)
    for role in ("actor_train", "critic", "model"):
        yield Damaged(f"no {role}", lambda folder, role=role: shutil.rmtree(folder / role))
    yield Damaged("a note beside", partial(_stray, "note.txt", "mine"), harmless=True)
    yield Damaged("a role more", partial(_stray, "reference/state.json", "{}"), harmless=True)
    yield Damaged("the state of several ranks beside", partial(_stray, "actor_train/state.json", "{}"))
    yield Damaged("an index beside", partial(_stray, "model/model.safetensors.index.json", "{}"), harmless=None)


# ---------------------------------------------------------------- the judge


def whole(folder: Path) -> Path:
    """A run in a new folder, three steps with a checkpoint each, and the metrics of the run that goes on from it."""
    folder.mkdir()
    with current(folder):
        Path("run.yaml").write_text(CONFIG)
        result = run(list(TRAIN))
        assert result.code == 0, result
    with tempfile.TemporaryDirectory() as copy, current(Path(copy)):
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        assert run(list(RESUME)).code == 0
        (folder / "next.json").write_text(json.dumps(_metrics()))
    return folder


def _metrics() -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "tps/", "system/")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


def judge(one: Damaged, before: Path) -> list[str]:
    """What should not be, of a damaged copy of the run `before` in the current folder, which is left empty."""
    for path in before.iterdir():
        shutil.copytree(path, path.name) if path.is_dir() else shutil.copy(path, path.name)
    try:
        one.harms(Path("out/checkpoints", NEWEST))
        result = run(list(RESUME))
        faults = list(faults_of("train", result, "checkpoint"))
        trained = len(_metrics()) > 3
        if one.harmless is not None and one.harmless != (result.code == 0):
            faults.append(f"refused: {result}" if one.harmless else "success, and it is wrong")
        if trained != (result.code == 0):
            faults.append(f"exit {result.code}, and it {'trained' if trained else 'did not train'}")
        if trained and (expected := json.loads(Path("next.json").read_text())) != _metrics():
            faults.append(f"it went on otherwise: {_metrics()[-1]} where the whole one gives {expected[-1]}")
        return faults
    finally:
        empty()


def main_by_hand() -> int:
    """Judge all, print every fault; how many have one."""
    with tempfile.TemporaryDirectory() as folder:
        before = whole(Path(folder) / "before")
        return judge_all("checkpoints", damaged(), partial(judge, before=before))


if __name__ == "__main__":
    sys.exit(1 if main_by_hand() else 0)
