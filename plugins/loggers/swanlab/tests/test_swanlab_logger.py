"""The swanlab logger offline: what stands in SwanLab's local store, what a resumed run leaves there, and no key
anywhere."""

from __future__ import annotations

import math
import signal
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

swanlab = pytest.importorskip("swanlab", reason="swanlab is not installed in this environment")

from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # noqa: E402
from swanlab.proto.swanlab.run.v1.run_pb2 import RunState  # noqa: E402
from swanlab.sdk.internal.core_python.store import DataStoreReader  # noqa: E402

from turnwise.plugins import reset_registry  # noqa: E402
from turnwise.testing.runs import FAKES, written  # noqa: E402
from turnwise.testing.synthetic import trajectories  # noqa: E402
from turnwise.testing.tracker import GIF, PNG, TrackerTests, turnwise  # noqa: E402
from turnwise_swanlab import logger as module  # noqa: E402
from turnwise_swanlab.config import SwanlabConfig  # noqa: E402
from turnwise_swanlab.logger import SwanlabLogger  # noqa: E402

KEY = "0123456789abcdefghijk"


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


class TestSwanlab(TrackerTests):
    kind, options = SwanlabLogger, SwanlabConfig
    key, variable, login = KEY, "SWANLAB_API_KEY", "swanlab login"
    lack = "SwanLab key for https://api.swanlab.cn on this machine"
    keys = ({"api_key": KEY}, {"login_kwargs": {"api_key": KEY}})

    def ids(self, folder: Path) -> list[str]:
        return [begun(segment).id for segment in segments(folder)]

    def logged(self, folder: Path) -> list[list[tuple[int, str, Any]]]:
        shown = [[r.media for r in segment if r.HasField("media")] for segment in segments(folder)]
        media = [[(one.step, one.key, None) for one in segment] for segment in shown]
        return [scalars(segment) + more for segment, more in zip(segments(folder), media)]

    def failed(self, folder: Path) -> bool:
        (end,) = (record.finish for record in segments(folder)[0] if record.HasField("finish"))
        crashed = end.state == RunState.RUN_STATE_CRASHED
        assert crashed or end.state == RunState.RUN_STATE_FINISHED
        assert end.error == ("ValueError" if crashed else "")
        return crashed

    def break_service(self, patch: pytest.MonkeyPatch) -> str:
        def fail(**_: Any) -> None:
            raise ConnectionError("the service is not there")

        patch.setattr(swanlab, "init", fail)
        return "ConnectionError: the service is not there"

    def test_disabled_leaves_nothing(self, tmp_path: Path) -> None:
        super().test_disabled_leaves_nothing(tmp_path)
        assert not (tmp_path / "run").exists()


SWANLAB = TestSwanlab()
make, check = SWANLAB.make, SWANLAB.problems


def test_every_name_of_online_needs_a_key() -> None:
    assert len({*check(), *check(mode="online"), *check(mode="cloud")}) == len(check()) == 1


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


def test_pictures_are_at_their_step_and_other_files_beside_them(tmp_path: Path) -> None:
    (tmp_path / "frame.png").write_bytes(PNG)
    (tmp_path / "play.gif").write_bytes(GIF)
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"login_kwargs": {"host": "h"}}, "$.track_with[0].login_kwargs.host: nothing logs in from a file. Fix: "),
        ({"name": "a", "experiment_name": "b"}, "$.track_with[0].experiment_name: is name, which stands here too."),
        ({"description": "a", "notes": "b"}, "$.track_with[0].notes: is description, which stands here too."),
    ],
)
def test_options_that_contradict_or_have_no_place_are_refused(options: dict[str, Any], expected: str) -> None:
    SWANLAB.configured(FAKES, **options)
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
