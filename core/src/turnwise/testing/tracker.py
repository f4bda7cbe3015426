"""What every logger of a tracking service keeps: tests that its own inherit, and whole runs with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from turnwise.cli.main import main
from turnwise.contracts.logger import LoggerContext
from turnwise.contracts.tracker import Tracker, TrackerConfig
from turnwise.testing import fake_model
from turnwise.testing.runs import FAKES, LAKE, written
from turnwise.testing.synthetic import trajectories

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)
"""A picture of one pixel."""
GIF = b"GIF89a\1\0\1\0\0\0\0;"
"""A film of none."""
OFFLINE: dict[str, Any] = {"mode": "offline", "system_metrics": False}


def turnwise(*arguments: str) -> Result:
    """The command line, in this process and folder."""
    return CliRunner().invoke(main, list(arguments))


class TrackerTests:
    """Tests of one service offline, in a current folder of their own; the service's class says the rest.

    `kind`, `options`: the logger and its config class. `key`: a text that could be the service's key. `variable`: where
    it belongs. `keys`: options of a file that hold it. `login`: the command that stores it. `lack`: how the lack of one
    is told, up to the host."""

    kind: ClassVar[type[Tracker]]
    options: ClassVar[type[TrackerConfig]]
    key: ClassVar[str]
    variable: ClassVar[str]
    keys: ClassVar[tuple[dict[str, Any], ...]]
    login: ClassVar[str]
    lack: ClassVar[str]

    def ids(self, folder: Path) -> list[str]:
        """The service's id of the run, of every process that logged below `folder`, the first one first."""
        raise NotImplementedError

    def logged(self, folder: Path) -> list[list[tuple[int, str, Any]]]:
        """Step, name and value of what each of them logged; of what is no number, any value."""
        raise NotImplementedError

    def failed(self, folder: Path) -> bool:
        """Whether the service has the only one as a failed one."""
        raise NotImplementedError

    def break_service(self, patch: pytest.MonkeyPatch) -> str:
        """Let a run's begin fail; how the error is told."""
        raise NotImplementedError

    def make(self, folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Tracker:
        """A logger of a run in `folder`, offline."""
        context = LoggerContext(folder, exp_name="trial", config=config or {})
        return self.kind(self.options(**{**OFFLINE, **options}), context)

    def problems(self, **options: Any) -> list[str]:
        """What its `check` says."""
        found = self.kind.check(self.options(**options), LoggerContext(Path()))  # type: ignore[attr-defined]
        return [f"{one.path}: {one.text}" for one in found]

    def configured(self, base: Any, **options: Any) -> None:
        """Write run.yaml with this logger."""
        plugins = [*base["plugins"], f"turnwise-{self.kind.service}"]
        logger = {"use": self.kind.service, "every": 1, **OFFLINE, **options}
        Path("run.yaml").write_text(written(base, {"plugins": plugins, "track_with": [logger]}), encoding="utf-8")

    def test_no_trajectories_where_none_are_wanted(self, tmp_path: Path) -> None:
        """`trajectories: 0` begins no run for them."""
        logger = self.make(tmp_path / "run", trajectories=0)
        logger.trajectories(0, "train", trajectories(groups=1))
        logger.close()
        assert not (tmp_path / "run").exists()

    def test_a_resumed_run_goes_on_under_its_id_after_what_it_had(self, tmp_path: Path) -> None:
        """A history that only grows keeps what was logged for the steps that are played again."""
        first = self.make(tmp_path)
        first.resume(0)
        for step in range(4):
            first.scalars(step, {"a": float(step)})
        first.close()
        second = self.make(tmp_path)
        second.resume(2)
        second.scalars(2, {"a": 20.0})
        second.close()
        kept = (tmp_path / self.kind.service / "turnwise_run_id").read_text()
        assert self.ids(tmp_path) == [kept, kept]
        assert self.logged(tmp_path) == [[(step, "a", float(step)) for step in range(4)], [(2, "a", 20.0)]]

    def test_what_starts_anew_in_the_same_folder_is_another_run(self, tmp_path: Path) -> None:
        """Step 0 is no resumed run."""
        ids = []
        for _ in range(2):
            logger = self.make(tmp_path)
            logger.resume(0)
            logger.close()
            ids.append((tmp_path / self.kind.service / "turnwise_run_id").read_text())
        assert self.ids(tmp_path) == ids
        assert len(set(ids)) == 2

    def test_disabled_leaves_nothing(self, tmp_path: Path) -> None:
        """No id either, under which a later run would go on."""
        logger = self.make(tmp_path / "run", mode="disabled")
        logger.resume(0)
        logger.scalars(0, {"a": 1.0})
        logger.trajectories(0, "train", trajectories(groups=1))
        logger.close()
        assert not list((tmp_path / "run").rglob("*"))

    def test_online_without_a_key_is_told_before_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the machine's lack, with every way out."""
        (line,) = self.problems()
        assert line.startswith(f"mode: online, and there is no {self.lack}")
        assert line.endswith(
            f" on this machine. Fix: {self.login}, or the environment variable {self.variable}, or mode: offline"
        )
        (problem,) = self.kind.check(self.options(), LoggerContext(Path()))  # type: ignore[attr-defined]
        assert problem.machine
        assert self.problems(mode="offline") == self.problems(mode="disabled") == []
        monkeypatch.setenv(self.variable, self.key)
        assert self.problems() == []

    def test_a_key_in_the_file_is_refused_and_not_repeated(self) -> None:
        """Wherever the service's options have room for one."""
        for options in self.keys:
            self.configured(FAKES, **options)
            got = turnwise("train", "run.yaml")
            assert got.exit_code == 2
            assert f"a key stands in no file. Fix: remove it, and run `{self.login}`" in got.output
            assert self.key not in got.output
            assert not Path("out").exists()

    def test_a_training_run_and_its_resumed_half_are_stored_without_any_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither the service's, nor the environment's, nor the file's."""
        monkeypatch.setenv(self.variable, self.key)
        monkeypatch.setenv("MY_TOKEN", "of-the-environment")
        self.configured(LAKE)
        secret = "actor_infer.system_envs={HF_TOKEN: of-the-file, OTHER: '${oc.env:MY_TOKEN}'}"
        for overrides in (["max_steps=2"], ["max_steps=2", "resume_from_checkpoint=out/checkpoints/checkpoint-000001"]):
            got = turnwise("train", "run.yaml", secret, *overrides)
            assert got.exit_code == 0, got.output + repr(got.exception)
        before, after = self.ids(tmp_path / "out")
        assert before == after
        for name in ("critic/score/mean", "trajectories/train"):
            steps = [[step for step, one, _ in logged if one == name] for logged in self.logged(tmp_path / "out")]
            assert steps == [[0, 1], [1]], name
        assert list(tmp_path.glob(f"out/{self.kind.service}/*run-*/files/report.md"))
        for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
            assert self.key.encode() not in path.read_bytes(), path
        for path in [p for p in (tmp_path / "out" / self.kind.service).rglob("*") if p.is_file()]:
            assert not any(text in path.read_bytes() for text in (b"of-the-environment", b"of-the-file")), path

    def test_a_run_that_an_error_ends_is_told_as_failed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And one that ends well is not."""

        def fail(*_: Any) -> None:
            raise ValueError("no update today")

        self.configured(FAKES)
        assert turnwise("train", "run.yaml", "output_dir=well").exit_code == 0
        monkeypatch.setattr(fake_model.FakeStrategy, "update", fail)
        assert turnwise("train", "run.yaml", "output_dir=ill").exit_code == 1
        assert [self.failed(tmp_path / folder) for folder in ("well", "ill")] == [False, True]

    def test_a_service_that_fails_does_not_stop_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is reported once."""
        self.configured(FAKES)
        told = self.break_service(monkeypatch)
        got = turnwise("train", "run.yaml")
        assert got.exit_code == 0, got.output
        log = Path("out/run.log").read_text(encoding="utf-8")
        assert f"logger {self.kind.service} failed in resume and is switched off: {told}" in log
        assert log.count(f"{self.kind.service} failed") == 1
