"""The swanlab logger: one SwanLab run for each training run, continued under its id when that is resumed."""

from __future__ import annotations

import glob
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import swanlab

from turnwise.contracts.logger import LoggerContext
from turnwise.data.trajectory import Trajectory
from turnwise.data.transcript import readable
from turnwise.errors import Problem
from turnwise_swanlab.config import SwanlabConfig

T = TypeVar("T")


class SwanlabLogger:
    """Local files lie in `swanlab/` below the run's folder, with the id of the run in `turnwise_run_id`."""

    def __init__(self, config: SwanlabConfig, context: LoggerContext) -> None:
        self._config = config
        self._context = context
        self._folder = context.folder / "swanlab"
        self._kept_id = self._folder / "turnwise_run_id"
        self._id: str | None = None
        self._run: Any = None

    @staticmethod
    def check(config: SwanlabConfig, context: LoggerContext) -> list[Problem]:
        """Options that SwanLab refuses; and online without a key, which the run could not begin without."""
        try:
            settings = swanlab.Settings(**_settings(config, context))
        except ValueError as error:
            return [Problem("", f"SwanLab refuses them: {why}. Fix: correct them") for why in _reasons(error)]
        if (config.mode or settings.mode) not in ("online", "cloud") or settings.api_key:
            return []
        lack = f"online, and there is no SwanLab key for {settings.api_host} on this machine"
        fix = "Fix: swanlab login, or the environment variable SWANLAB_API_KEY, or mode: offline"
        return [Problem("mode", f"{lack}. {fix}", machine=True)]

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Every metric at its step; NaN and infinities are kept."""
        if metrics:
            self._open().log({name: float(value) for name, value in metrics.items()}, step=step)

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """The transcripts of the first of them."""
        shown = trajectories[: self._config.trajectories]
        if shown and (split != "train" or step % self._config.every == 0):
            # SwanLab encodes strictly: a lone surrogate becomes its escape.
            texts = [readable(one).encode("utf-8", "backslashreplace").decode("utf-8") for one in shown]
            captions = [f"score {one.score:g}, {one.stop_reason}" for one in shown]
            pairs = zip(texts, captions, strict=True)
            self._open().log({f"trajectories/{split}": [swanlab.Text(*pair) for pair in pairs]}, step=step)

    def artifact(self, step: int, name: str, path: Path) -> None:
        """A picture among the metrics; any other file among the run's files."""
        suffix = path.suffix.lower()
        if suffix in (".png", ".jpg", ".jpeg"):
            self._open().log({name: swanlab.Image(str(path))}, step=step)
        elif suffix == ".gif":
            self._open().log({name: swanlab.Video(str(path))}, step=step)
        else:
            self._open().save(glob.escape(str(path)), base_path=str(path.parent), policy="now")

    def resume(self, step: int) -> None:
        """Begin a run, or go on with the one of this folder. SwanLab keeps the first value of a metric at a step: what it
        has of `step` and later stays."""
        self.close()
        self._id = self._kept_id.read_text(encoding="utf-8") if step > 0 and self._kept_id.exists() else None
        self._open()

    def close(self) -> None:
        """End the run, as a crashed one where an error ends it; may be called twice."""
        if self._run is None:
            return
        run, self._run = self._run, None
        error = sys.exc_info()[0]
        end = {"state": "success"} if error is None else {"state": "crashed", "error": error.__name__}
        _within(self._config.finish_timeout, "finish_timeout", lambda: run.finish(**end))

    def _open(self) -> Any:
        """The run; begun now if it is not, and continued if it was closed."""
        if self._run is None:
            self._id = self._id or secrets.token_hex(8)
            # SwanLab takes SIGINT where it starts in the main thread, and Ctrl-C belongs to the training run.
            self._run = _within(self._config.init_timeout, "init_timeout", self._begin)
            if self._run.mode != "disabled":
                self._folder.mkdir(parents=True, exist_ok=True)
                self._kept_id.write_text(self._id, encoding="utf-8")
        return self._run

    def _begin(self) -> Any:
        settings = _settings(self._config, self._context)
        return swanlab.init(
            id=self._id,
            resume="allow",
            log_dir=str(self._folder.absolute()),
            config=dict(self._context.config),
            mode="online" if self._config.mode == "cloud" else self._config.mode,
            settings=swanlab.Settings(**settings),
        )


def _settings(config: SwanlabConfig, context: LoggerContext) -> dict[str, Any]:
    """SwanLab's settings. The command line, which may hold a key, the code and the packages are not sent, and the
    terminal stays this program's own."""
    experiment = {
        "name": config.name or config.experiment_name or context.exp_name,
        "description": config.description or config.notes,
        "tags": list(config.tags) or None,
        "group": config.group,
        "job_type": config.job_type,
    }
    project = {"name": config.project, "workspace": config.workspace}
    unsaid = dict.fromkeys(("runtime", "requirements", "conda", "git"), False)
    return {
        "interactive": False,
        "project": {name: value for name, value in project.items() if value is not None},
        "experiment": {name: value for name, value in experiment.items() if value is not None},
        "probe": {"hardware": config.system_metrics, "monitor": config.system_metrics, **unsaid},
        "terminal": {"proxy_type": "none"},
    }


def _reasons(error: ValueError) -> list[str]:
    """Which settings are wrong, without their values."""
    found = error.errors() if hasattr(error, "errors") else [{"loc": (), "msg": str(error)}]
    return [": ".join([".".join(map(str, one["loc"])), str(one["msg"])]) for one in found]


def _within(seconds: float, option: str, call: Callable[[], T]) -> T:
    """`call`, on a thread of its own that nothing waits for when the time is over."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again where it is waited for
            future.set_exception(error)

    threading.Thread(target=work, name=f"swanlab-{option}", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():  # its own
            raise
        raise TimeoutError(f"no answer within {option} = {seconds:g} s. Fix: raise it, or mode: offline") from error
