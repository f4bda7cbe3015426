"""The swanlab logger offline: what stands in SwanLab's local store, what a resumed run leaves there, and no key
anywhere."""

from __future__ import annotations

import math
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from attrs import evolve
from click.testing import CliRunner, Result

swanlab = pytest.importorskip("swanlab", reason="swanlab is not installed in this environment")

from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # noqa: E402
from swanlab.sdk.internal.core_python.store import DataStoreReader  # noqa: E402

from turnwise.cli.main import main  # noqa: E402
from turnwise.contracts.logger import LoggerContext  # noqa: E402
from turnwise.plugins import reset_registry  # noqa: E402
from turnwise.testing import fake_model  # noqa: E402
from turnwise.testing.runs import FAKES, LAKE, written  # noqa: E402
from turnwise.testing.synthetic import trajectories  # noqa: E402
from turnwise_swanlab import logger as module  # noqa: E402
from turnwise_swanlab.config import SwanlabConfig  # noqa: E402
from turnwise_swanlab.logger import SwanlabLogger  # noqa: E402

KEY = "0123456789abcdefghijk"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home and a folder of its own, and none of SwanLab's variables."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("API_KEY", "MODE", "API_HOST", "WEB_HOST", "ROOT", "SAVE_DIR", "LOG_DIR", "PROJ_NAME"):
        monkeypatch.delenv(f"SWANLAB_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    reset_registry()
    yield
    reset_registry()
    assert not swanlab.has_run(), "a test left a run open"


def make(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> SwanlabLogger:
    chosen: dict[str, Any] = {"mode": "offline", "system_metrics": False, **options}
    return SwanlabLogger(SwanlabConfig(**chosen), LoggerContext(folder, exp_name="trial", config=config or {}))


def segments(folder: Path) -> list[list[Any]]:
    """The records of every process that logged into the folder, by SwanLab's own reader, the first one first."""
    found = []
    for path in folder.glob("swanlab/run-*/run-*.swanlab"):
        reader = DataStoreReader()
        reader.open(path)
        found.append([Record.FromString(one) for one in reader])
        reader.close()
    return sorted(found, key=lambda segment: begun(segment).started_at.ToNanoseconds())


def scalars(segment: list[Any]) -> list[tuple[int, str, float]]:
    numbers = [record.scalar for record in segment if record.HasField("scalar")]
    return [(one.step, one.key, one.value.number) for one in numbers]


def begun(segment: list[Any]) -> Any:
    """The record of the start."""
    return next(record.start for record in segment if record.HasField("start"))


def test_every_metric_stands_at_its_step_as_it_was(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"policy/loss": math.nan, "policy/kl": math.inf, "a": np.float32(0.5)})
    logger.scalars(7, {"a name/nobody knows [é]": 2})
    logger.scalars(7, {})
    logger.close()
    (segment,) = segments(tmp_path)
    (step, name, loss), *others = scalars(segment)
    assert (step, name, math.isnan(loss)) == (0, "policy/loss", True)
    assert others == [(0, "policy/kl", math.inf), (0, "a", 0.5), (7, "a name/nobody knows [é]", 2.0)]


def test_the_run_has_the_names_of_the_options_and_the_configuration(tmp_path: Path) -> None:
    named = {"project": "lakes", "workspace": "us", "tags": ("a", "b"), "group": "g", "job_type": "train", "notes": "n"}
    logger = make(tmp_path, {"seed": 1, "actor_train": {"device_mapping": [0, 1]}}, **named)
    logger.resume(0)
    logger.close()
    run = begun(segments(tmp_path)[0])
    assert (run.project, run.workspace, list(run.tags), run.description) == ("lakes", "us", ["a", "b"], "n")
    assert (run.group, run.job_type, run.name) == ("g", "train", "trial")
    (stored,) = tmp_path.glob("swanlab/run-*/files/config.yaml")
    config = {name: item["value"] for name, item in yaml.safe_load(stored.read_text()).items()}
    assert config == {"seed": 1, "actor_train": {"device_mapping": [0, 1]}}


def test_neither_the_command_line_nor_code_and_packages_are_stored(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"a": 1.0})
    logger.close()
    assert not list(tmp_path.rglob("requirements.txt"))
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        assert sys.argv[0].encode() not in path.read_bytes(), path
    assert not any(record.HasField("log") for record in segments(tmp_path)[0])


def test_the_first_trajectories_of_a_step_are_their_transcripts(tmp_path: Path) -> None:
    made = trajectories(groups=2)
    logger = make(tmp_path, trajectories=2, every=3)
    for step in range(5):
        logger.trajectories(step, "train", made)
    logger.trajectories(1, "val", [evolve(made[0], tag="\udc80")])
    logger.trajectories(1, "val", [])
    logger.close()
    media = [record.media for record in segments(tmp_path)[0] if record.HasField("media")]
    assert [(one.key, one.step) for one in media] == [
        ("trajectories/train", 0),
        ("trajectories/train", 3),
        ("trajectories/val", 1),
    ]
    (folder,) = tmp_path.glob("swanlab/run-*/media/text")
    texts = [(folder / item.filename).read_text(encoding="utf-8") for item in media[0].value.items]
    assert [text.splitlines()[0] for text in texts] == [
        f"=== {t.tag}, task {t.group}, member {t.member}" for t in made[:2]
    ]
    assert media[0].value.items[0].caption == f"score {made[0].score:g}, {made[0].stop_reason}"
    assert (folder / media[2].value.items[0].filename).read_text().startswith("=== \\udc80")


def test_no_trajectories_where_none_are_wanted(tmp_path: Path) -> None:
    logger = make(tmp_path / "run", trajectories=0)
    logger.trajectories(0, "train", trajectories(groups=1))
    logger.close()
    assert not (tmp_path / "run").exists()


def test_pictures_are_at_their_step_and_other_files_beside_them(tmp_path: Path) -> None:
    (tmp_path / "frame.png").write_bytes(PNG)
    (tmp_path / "play.gif").write_bytes(b"GIF89a" + struct.pack("<HH", 1, 1) + bytes(3) + b";")
    (tmp_path / "report [1].md").write_text("# it went well", encoding="utf-8")
    logger = make(tmp_path)
    logger.artifact(2, "val/frame", tmp_path / "frame.png")
    logger.artifact(2, "val/play", tmp_path / "play.gif")
    logger.artifact(3, "report", tmp_path / "report [1].md")
    logger.close()
    (segment,) = segments(tmp_path)
    media = [record.media for record in segment if record.HasField("media")]
    assert [(one.key, one.step) for one in media] == [("val/frame", 2), ("val/play", 2)]
    assert {path.suffix for path in tmp_path.glob("swanlab/run-*/media/*/*")} == {".png", ".gif"}
    (report,) = tmp_path.glob("swanlab/run-*/files/report*.md")
    assert report.read_text(encoding="utf-8") == "# it went well"


def test_a_resumed_run_goes_on_under_its_id_beside_what_it_had(tmp_path: Path) -> None:
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
    assert begun(before).id == begun(after).id == (tmp_path / "swanlab/turnwise_run_id").read_text()
    assert scalars(before) == [(step, "a", float(step)) for step in range(4)]
    assert scalars(after) == [(2, "a", 20.0)]


def test_what_starts_anew_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    ids = set()
    for _ in range(2):
        logger = make(tmp_path)
        logger.resume(0)
        logger.close()
        ids.add((tmp_path / "swanlab/turnwise_run_id").read_text())
    assert {begun(segment).id for segment in segments(tmp_path)} == ids
    assert len(ids) == 2


def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    logger = make(tmp_path / "run", mode="disabled")
    logger.resume(0)
    logger.scalars(0, {"a": 1.0})
    logger.trajectories(0, "train", trajectories(groups=1))
    logger.close()
    assert not (tmp_path / "run").exists()


def test_ctrl_c_stays_the_training_runs_own(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    logger = make(tmp_path)
    logger.resume(0)
    assert signal.getsignal(signal.SIGINT) is before
    logger.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_service_that_does_not_answer_is_waited_for_no_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(module.swanlab, "init", lambda **_: over.wait(20))
    logger = make(tmp_path, init_timeout=0.05)
    start = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"no answer within init_timeout = 0\.05 s\. Fix: raise it, or mode: offline"
    ):
        logger.resume(0)
    assert time.monotonic() - start < 5
    over.set()


# ---------------------------------------------------------------- keys, and the whole run


def check(**options: Any) -> list[str]:
    return [f"{one.path}: {one.text}" for one in SwanlabLogger.check(SwanlabConfig(**options), LoggerContext(Path()))]


def test_online_without_a_key_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (
        "mode: online, and there is no SwanLab key for https://api.swanlab.cn on this machine. Fix: swanlab login"
    )
    for mode in (None, "online", "cloud"):
        (line,) = check(mode=mode)
        assert line == f"{expected}, or the environment variable SWANLAB_API_KEY, or mode: offline"
    assert SwanlabLogger.check(SwanlabConfig(), LoggerContext(Path()))[0].machine
    assert check(mode="offline") == check(mode="disabled") == []
    monkeypatch.setenv("SWANLAB_API_KEY", KEY)
    assert check() == []


def test_the_mode_of_the_environment_is_taken_where_the_file_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    assert check() == []
    assert len(check(mode="online")) == 1


def test_the_key_of_swanlab_login_is_found(tmp_path: Path) -> None:
    (tmp_path / "home/.swanlab").mkdir()
    entry = f"machine https://api.swanlab.cn\n  login https://swanlab.cn\n  password {KEY}\n"
    (tmp_path / "home/.swanlab/.netrc").write_text(entry, encoding="utf-8")
    assert check() == []


def test_options_that_swanlab_refuses_are_told() -> None:
    (line,) = check(mode="offline", project="a b/c")
    assert line.startswith(": SwanLab refuses them: project.name: ")


def turnwise(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def with_logger(base: Any, **options: Any) -> None:
    logger = {"use": "swanlab", "mode": "offline", "system_metrics": False, "every": 1, **options}
    plugins = [*base["plugins"], "turnwise-swanlab"]
    Path("run.yaml").write_text(written(base, {"plugins": plugins, "track_with": [logger]}), encoding="utf-8")


@pytest.mark.parametrize("options", [{"api_key": KEY}, {"login_kwargs": {"api_key": KEY}}])
def test_a_key_in_the_file_is_refused_and_not_repeated(options: dict[str, Any]) -> None:
    with_logger(FAKES, **options)
    got = turnwise("train", "run.yaml")
    assert got.exit_code == 2
    assert "a key stands in no file. Fix: remove it, and run `swanlab login`" in got.output
    assert KEY not in got.output
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"login_kwargs": {"host": "h"}}, "$.track_with[0].login_kwargs.host: nothing logs in from a file. Fix: "),
        ({"name": "a", "experiment_name": "b"}, "$.track_with[0].experiment_name: is name, which stands here too."),
        ({"description": "a", "notes": "b"}, "$.track_with[0].notes: is description, which stands here too."),
    ],
)
def test_options_that_contradict_or_have_no_place_are_refused(options: dict[str, Any], expected: str) -> None:
    with_logger(FAKES, **options)
    got = turnwise("check", "run.yaml")
    assert got.exit_code == 2
    assert expected in got.output


def test_a_field_file_with_its_tracker_options_is_read() -> None:
    tracker = {"login_kwargs": {"api_key": None}, "project": "p", "experiment_name": "${exp_name}_x", "logdir": "x"}
    changes = {"track_with": "swanlab", "tracker_kwargs": tracker, "plugins": [*FAKES["plugins"], "turnwise-swanlab"]}
    Path("run.yaml").write_text(written(FAKES, changes), encoding="utf-8")
    got = turnwise("check", "run.yaml")
    assert got.exit_code == 3, got.output
    assert "machine: $.track_with[0].mode: online, and there is no SwanLab key" in got.output
    assert "tracker_kwargs.logdir: has no effect" in got.output
    assert turnwise("plan", "run.yaml").exit_code == 0


def test_a_training_run_and_its_resumed_half_are_stored_without_any_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWANLAB_API_KEY", KEY)
    monkeypatch.setenv("MY_TOKEN", "of-the-environment")
    with_logger(LAKE)
    secret = "actor_infer.system_envs={HF_TOKEN: of-the-file, OTHER: '${oc.env:MY_TOKEN}'}"
    for overrides in (["max_steps=2"], ["max_steps=2", "resume_from_checkpoint=out/checkpoints/checkpoint-000001"]):
        got = turnwise("train", "run.yaml", secret, *overrides)
        assert got.exit_code == 0, got.output + repr(got.exception)
    before, after = segments(tmp_path / "out")
    assert begun(before).id == begun(after).id
    assert [step for step, name, _ in scalars(before) if name == "critic/score/mean"] == [0, 1]
    assert [step for step, name, _ in scalars(after) if name == "critic/score/mean"] == [1]
    assert [record.media.step for record in before if record.HasField("media")] == [0, 1]
    assert list(tmp_path.glob("out/swanlab/run-*/files/report.md"))
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        assert KEY.encode() not in path.read_bytes(), path
    for path in [p for p in (tmp_path / "out/swanlab").rglob("*") if p.is_file()]:
        assert not any(text in path.read_bytes() for text in (b"of-the-environment", b"of-the-file")), path


def test_a_run_that_an_error_ends_is_told_as_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no update today")

    with_logger(FAKES)
    assert turnwise("train", "run.yaml", "output_dir=well").exit_code == 0
    monkeypatch.setattr(fake_model.FakeStrategy, "update", fail)
    assert turnwise("train", "run.yaml", "output_dir=ill").exit_code == 1
    (well,), (ill,) = ([r.finish for r in segments(tmp_path / d)[0] if r.HasField("finish")] for d in ("well", "ill"))
    assert well.state != ill.state
    assert (well.error, ill.error) == ("", "ValueError")


def test_a_service_that_fails_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("the service is not there")

    with_logger(FAKES)
    monkeypatch.setattr(swanlab, "init", fail)
    got = turnwise("train", "run.yaml")
    assert got.exit_code == 0, got.output
    log = Path("out/run.log").read_text(encoding="utf-8")
    assert "logger swanlab failed in resume and is switched off: ConnectionError: the service is not there" in log
    assert log.count("swanlab failed") == 1
