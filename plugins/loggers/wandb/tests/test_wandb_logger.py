"""The wandb logger offline: what stands in W&B's local store, what a resumed run leaves there, and no key anywhere."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

wandb = pytest.importorskip("wandb", reason="wandb is not installed in this environment")

from wandb.proto.wandb_internal_pb2 import Record  # noqa: E402

from turnwise.data import Trajectory  # noqa: E402
from turnwise.plugins import reset_registry  # noqa: E402
from turnwise.testing.runs import FAKES, written  # noqa: E402
from turnwise.testing.synthetic import trajectories  # noqa: E402
from turnwise.testing.tracker import GIF, PNG, TrackerTests, turnwise  # noqa: E402
from turnwise_wandb.config import WandbConfig  # noqa: E402
from turnwise_wandb.logger import WandbLogger  # noqa: E402

KEY = "0123456789abcdef" * 3
HEADER, BLOCK = 7, 32768


@pytest.fixture(scope="module", autouse=True)
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """W&B's own process, which the tests share, writes no file into anybody's home and tells nobody of errors."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
            patch.setenv(name, str(home))
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "NETRC"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_SILENT", "true")
        wandb.teardown()
        yield
        wandb.teardown()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    reset_registry()
    yield
    reset_registry()


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, as far as it is written: a header, then blocks of 32 KiB with the chunks of
    LevelDB's log format."""
    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        chunk = data[at + HEADER : at + HEADER + size]
        if len(chunk) < size:
            return
        at += HEADER + size
        whole = chunk if kind in (1, 2) else whole + chunk  # full, first, middle, last
        if kind in (1, 4):
            yield Record.FromString(whole)


def of(segment: list[Any], kind: str) -> list[Any]:
    """The records of one kind."""
    return [getattr(record, kind) for record in segment if record.WhichOneof("record_type") == kind]


def segments(folder: Path) -> list[list[Any]]:
    """The records of every run that logged into the folder, the first one first. W&B's process ends a file a moment
    after `finish`."""
    until = time.monotonic() + 60
    while True:
        found = [list(records(path)) for path in folder.glob("wandb/offline-run-*/run-*.wandb")]
        if all(of(segment, "exit") for segment in found):
            return sorted(found, key=lambda segment: begun(segment).start_time.ToNanoseconds())
        assert time.monotonic() < until, "W&B wrote no end"
        time.sleep(0.02)


def rows(segment: list[Any]) -> list[dict[str, Any]]:
    """The rows of the history, without what W&B adds of its own."""
    found = []
    for history in of(segment, "history"):
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        found.append({name: value for name, value in row.items() if not name.startswith("_")})
    return found


def begun(segment: list[Any]) -> Any:
    """The record of the run."""
    return of(segment, "run")[0]


class TestWandb(TrackerTests):
    kind, options = WandbLogger, WandbConfig
    key, variable, login, lack = KEY, "WANDB_API_KEY", "wandb login", "W&B key for https://"
    keys = ({"api_key": KEY}, {"settings": {"api_key": KEY}})

    def ids(self, folder: Path) -> list[str]:
        first, *others = (begun(segment) for segment in segments(folder))
        assert all(one.resume for one in others if one.run_id == first.run_id)
        return [one.run_id for one in (first, *others)]

    def logged(self, folder: Path) -> list[list[tuple[int, str, Any]]]:
        return [[one for row in rows(segment) for one in self._of(row)] for segment in segments(folder)]

    def _of(self, row: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
        """A table is a row's name with several parts, one of them its type."""
        tables = [name.removesuffix("/_type") for name in row if name.endswith("/_type")]
        yield from ((row["step"], name, None) for name in tables)
        parts = tuple(f"{name}/" for name in tables)
        yield from ((row["step"], *pair) for pair in row.items() if pair[0] != "step" and not pair[0].startswith(parts))

    def failed(self, folder: Path) -> bool:
        (end,) = of(segments(folder)[0], "exit")
        assert end.exit_code in (0, 1)
        return bool(end.exit_code)

    def break_service(self, patch: pytest.MonkeyPatch) -> str:
        def fail(**_: Any) -> None:
            raise wandb.errors.CommError("the service is not there")

        patch.setattr(wandb, "init", fail)
        return "CommError: the service is not there"


WANDB = TestWandb()
make, check = WANDB.make, WANDB.problems


def test_a_step_is_a_row_with_every_number_as_it_was(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"policy/loss": math.nan, "policy/kl": math.inf, "a": np.float32(0.5)})
    logger.scalars(7, {"a name/nobody knows [é]": 2})
    logger.scalars(7, {})
    logger.close()
    (segment,) = segments(tmp_path)
    first, second = rows(segment)
    assert math.isnan(first.pop("policy/loss"))
    assert (first, second) == (
        {"policy/kl": math.inf, "a": 0.5, "step": 0},
        {"a name/nobody knows [é]": 2.0, "step": 7},
    )


def test_the_run_has_the_names_of_the_options_and_the_configuration(tmp_path: Path) -> None:
    named = {"project": "lakes", "entity": "us", "tags": ("a", "b"), "notes": "n", "group": "g", "job_type": "train"}
    logger = make(tmp_path, {"seed": 1, "actor_train": {"device_mapping": [0, 1]}}, **named)
    logger.resume(0)
    logger.close()
    run = begun(segments(tmp_path)[0])
    config = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != "_wandb"}
    assert (run.project, run.entity, list(run.tags), run.notes) == ("lakes", "us", ["a", "b"], "n")
    assert (run.run_group, run.job_type, run.display_name) == ("g", "train", "trial")
    assert config == {"seed": 1, "actor_train": {"device_mapping": [0, 1]}}


def test_neither_the_command_line_nor_code_and_packages_are_stored(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"a": 1.0})
    logger.close()
    kinds = {record.WhichOneof("record_type") for record in segments(tmp_path)[0]}
    assert not list(tmp_path.rglob("wandb-metadata.json")) + list(tmp_path.rglob("requirements.txt"))
    assert not kinds & {"output", "output_raw", "environment"}


def test_the_first_trajectories_of_a_step_are_a_table_with_their_transcripts(tmp_path: Path) -> None:
    made = trajectories(groups=2)
    logger = make(tmp_path, trajectories=2, every=3)
    for step in range(5):
        logger.trajectories(step, "train", made)
    logger.trajectories(1, "val", [evolve(made[0], tag="\udc80")])
    logger.trajectories(1, "val", [])
    logger.close()
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    train = [table for table in tables if len(table["data"]) == 2]
    shown = rows(segments(tmp_path)[0])
    assert [row["step"] for row in shown] == [0, 3, 1]
    assert len(train) == 2
    for tag, task, member, _, score, success, stop, turns, transcript in train[0]["data"]:
        one = next(t for t in made if (t.tag, t.group, t.member) == (tag, task, member))
        assert (score, success, stop, turns) == (one.score, one.success, one.stop_reason, len(one.turns))
        assert transcript.startswith(f"=== {tag}, task {task}")
    assert "\\udc80" in next(table for table in tables if len(table["data"]) == 1)["data"][0][0]


def test_pictures_are_in_the_history_and_other_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "frame.png").write_bytes(PNG)
    (tmp_path / "play.gif").write_bytes(GIF)
    (tmp_path / "report [1].md").write_text("# it went well", encoding="utf-8")
    logger = make(tmp_path)
    logger.artifact(2, "val/frame", tmp_path / "frame.png")
    logger.artifact(2, "val/play", tmp_path / "play.gif")
    logger.artifact(3, "report", tmp_path / "report [1].md")
    logger.close()
    found = {path.suffix for path in tmp_path.glob("wandb/offline-run-*/files/media/**/*") if path.is_file()}
    assert found == {".png", ".gif"}
    (report,) = tmp_path.glob("wandb/offline-run-*/files/report*.md")
    assert (report.is_symlink(), report.read_text(encoding="utf-8")) == (False, "# it went well")


def test_the_key_of_wandb_login_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text(f"machine wandb.of.us login user password {KEY}\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert check(settings={"base_url": "https://wandb.of.us"}) == []
    assert len(check(settings={"base_url": "https://wandb.of.others"})) == 1


def test_settings_that_wandb_refuses_are_told_without_their_values() -> None:
    (line,) = check(mode="offline", settings={"no_such_thing": KEY})
    assert line.startswith("settings: W&B refuses them: no_such_thing: ")
    assert KEY not in line


def test_a_field_file_with_its_tracker_options_is_read(tmp_path: Path) -> None:
    tracker = {"api_key": None, "project": "p", "name": "${exp_name}_x", "notes": "n", "tags": ["a"], "log_dir": "x"}
    changes = {"track_with": "wandb", "tracker_kwargs": tracker, "plugins": [*FAKES["plugins"], "turnwise-wandb"]}
    Path("run.yaml").write_text(written(FAKES, changes), encoding="utf-8")
    got = turnwise("check", "run.yaml")
    assert got.exit_code == 3, got.output
    assert "machine: $.track_with[0].mode: online, and there is no W&B key" in got.output
    assert "tracker_kwargs.log_dir: has no effect" in got.output
    assert turnwise("plan", "run.yaml").exit_code == 0


def test_an_empty_trajectory_is_a_row_too(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.trajectories(0, "val", [Trajectory("Lake", 0, 0, 1, (), "length")])
    logger.close()
    (table,) = tmp_path.rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0][4:8] == [0.0, None, "length", 0]
