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
from click.testing import CliRunner, Result

wandb = pytest.importorskip("wandb", reason="wandb is not installed in this environment")

from wandb.proto.wandb_internal_pb2 import Record  # noqa: E402

from turnwise.cli.main import main  # noqa: E402
from turnwise.contracts.logger import LoggerContext  # noqa: E402
from turnwise.data import Trajectory  # noqa: E402
from turnwise.plugins import reset_registry  # noqa: E402
from turnwise.testing import fake_model  # noqa: E402
from turnwise.testing.runs import FAKES, LAKE, written  # noqa: E402
from turnwise.testing.synthetic import trajectories  # noqa: E402
from turnwise_wandb.config import WandbConfig  # noqa: E402
from turnwise_wandb.logger import WandbLogger  # noqa: E402

KEY = "0123456789abcdef" * 3
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)
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


def make(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> WandbLogger:
    chosen: dict[str, Any] = {"mode": "offline", "system_metrics": False, **options}
    return WandbLogger(WandbConfig(**chosen), LoggerContext(folder, exp_name="trial", config=config or {}))


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


def test_no_trajectories_where_none_are_wanted(tmp_path: Path) -> None:
    logger = make(tmp_path, trajectories=0)
    logger.trajectories(0, "train", trajectories(groups=1))
    logger.close()
    assert not list(tmp_path.iterdir())


def test_pictures_are_in_the_history_and_other_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "frame.png").write_bytes(PNG)
    (tmp_path / "play.gif").write_bytes(b"GIF89a" + struct.pack("<HH", 1, 1) + bytes(3) + b";")
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


def test_a_resumed_run_goes_on_under_its_id_after_what_it_had(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.resume(0)
    for step in range(4):
        first.scalars(step, {"a": float(step)})
    first.close()
    second = make(tmp_path)
    second.resume(2)
    second.scalars(2, {"a": 20.0})
    second.close()
    before, after = segments(tmp_path)
    assert begun(before).run_id == begun(after).run_id == (tmp_path / "wandb/turnwise_run_id").read_text()
    assert begun(after).resume
    assert [row["step"] for row in rows(before)] == [0, 1, 2, 3]
    assert rows(after) == [{"a": 20.0, "step": 2}]


def test_what_starts_anew_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    ids = set()
    for _ in range(2):
        logger = make(tmp_path)
        logger.resume(0)
        logger.close()
        ids.add((tmp_path / "wandb/turnwise_run_id").read_text())
    assert {begun(segment).run_id for segment in segments(tmp_path)} == ids
    assert len(ids) == 2


def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    logger = make(tmp_path / "run", mode="disabled")
    logger.resume(0)
    logger.scalars(0, {"a": 1.0})
    logger.trajectories(0, "train", trajectories(groups=1))
    logger.close()
    assert not list((tmp_path / "run").rglob("*"))


# ---------------------------------------------------------------- keys, and the whole run


def check(**options: Any) -> list[str]:
    return [f"{one.path}: {one.text}" for one in WandbLogger.check(WandbConfig(**options), LoggerContext(Path()))]


def test_online_without_a_key_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = check()
    assert line.startswith("mode: online, and there is no W&B key for https://")
    assert line.endswith("Fix: wandb login, or the environment variable WANDB_API_KEY, or mode: offline")
    assert WandbLogger.check(WandbConfig(), LoggerContext(Path()))[0].machine
    assert check(mode="offline") == check(mode="disabled") == []
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert check() == []


def test_the_key_of_wandb_login_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text(f"machine wandb.of.us login user password {KEY}\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert check(settings={"base_url": "https://wandb.of.us"}) == []
    assert len(check(settings={"base_url": "https://wandb.of.others"})) == 1


def test_settings_that_wandb_refuses_are_told_without_their_values() -> None:
    (line,) = check(mode="offline", settings={"no_such_thing": KEY})
    assert line.startswith("settings: W&B refuses them: no_such_thing: ")
    assert KEY not in line


def turnwise(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def with_logger(base: Any, **options: Any) -> None:
    logger = {"use": "wandb", "mode": "offline", "system_metrics": False, "every": 1, **options}
    plugins = [*base["plugins"], "turnwise-wandb"]
    Path("run.yaml").write_text(written(base, {"plugins": plugins, "track_with": [logger]}), encoding="utf-8")


@pytest.mark.parametrize("options", [{"api_key": KEY}, {"settings": {"api_key": KEY}}])
def test_a_key_in_the_file_is_refused_and_not_repeated(options: dict[str, Any]) -> None:
    with_logger(FAKES, **options)
    got = turnwise("train", "run.yaml")
    assert got.exit_code == 2
    assert "a key stands in no file. Fix: remove it, and run `wandb login`" in got.output
    assert KEY not in got.output
    assert not Path("out").exists()


def test_a_field_file_with_its_tracker_options_is_read(tmp_path: Path) -> None:
    tracker = {"api_key": None, "project": "p", "name": "${exp_name}_x", "notes": "n", "tags": ["a"], "log_dir": "x"}
    changes = {"track_with": "wandb", "tracker_kwargs": tracker, "plugins": [*FAKES["plugins"], "turnwise-wandb"]}
    Path("run.yaml").write_text(written(FAKES, changes), encoding="utf-8")
    got = turnwise("check", "run.yaml")
    assert got.exit_code == 3, got.output
    assert "machine: $.track_with[0].mode: online, and there is no W&B key" in got.output
    assert "tracker_kwargs.log_dir: has no effect" in got.output
    assert turnwise("plan", "run.yaml").exit_code == 0


def test_a_training_run_and_its_resumed_half_are_stored_without_any_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MY_TOKEN", "of-the-environment")
    with_logger(LAKE)
    secret = "actor_infer.system_envs={HF_TOKEN: of-the-file, OTHER: '${oc.env:MY_TOKEN}'}"
    for overrides in (["max_steps=2"], ["max_steps=2", "resume_from_checkpoint=out/checkpoints/checkpoint-000001"]):
        got = turnwise("train", "run.yaml", secret, *overrides)
        assert got.exit_code == 0, got.output + repr(got.exception)
    before, after = segments(tmp_path / "out")
    assert begun(before).run_id == begun(after).run_id
    # The scalars, the table and, at the end, the files of every step.
    assert [row["step"] for row in rows(before) if "critic/score/mean" in row] == [0, 1]
    assert [row["step"] for row in rows(after) if "critic/score/mean" in row] == [1]
    assert [row["step"] for row in rows(before) if "critic/score/mean" not in row] == [0, 1]
    assert list(tmp_path.glob("out/wandb/offline-run-*/files/report.md"))
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        assert KEY.encode() not in path.read_bytes(), path
    for path in [p for p in (tmp_path / "out/wandb").rglob("*") if p.is_file()]:
        assert not any(text in path.read_bytes() for text in (b"of-the-environment", b"of-the-file")), path


def test_a_run_that_an_error_ends_is_told_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no update today")

    with_logger(FAKES)
    assert turnwise("train", "run.yaml", "output_dir=well").exit_code == 0
    monkeypatch.setattr(fake_model.FakeStrategy, "update", fail)
    assert turnwise("train", "run.yaml", "output_dir=ill").exit_code == 1
    for folder, code in (("well", 0), ("ill", 1)):
        (end,) = of(segments(tmp_path / folder)[0], "exit")
        assert end.exit_code == code


def test_a_service_that_fails_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise wandb.errors.CommError("the service is not there")

    with_logger(FAKES)
    monkeypatch.setattr(wandb, "init", fail)
    got = turnwise("train", "run.yaml")
    assert got.exit_code == 0, got.output
    log = Path("out/run.log").read_text(encoding="utf-8")
    assert "logger wandb failed in resume and is switched off: CommError: the service is not there" in log
    assert log.count("wandb failed") == 1


def test_an_empty_trajectory_is_a_row_too(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.trajectories(0, "val", [Trajectory("Lake", 0, 0, 1, (), "length")])
    logger.close()
    (table,) = tmp_path.rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0][4:8] == [0.0, None, "length", 0]
