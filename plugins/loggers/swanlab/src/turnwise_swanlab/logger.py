"""The swanlab logger: one SwanLab run for each training run, continued under its id when that is resumed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import swanlab

from turnwise.contracts.logger import LoggerContext
from turnwise.contracts.tracker import Tracker, no_key, reasons, transcript
from turnwise.data.trajectory import Trajectory
from turnwise.errors import Problem
from turnwise_swanlab.config import LOGIN, SwanlabConfig

T = TypeVar("T")


class SwanlabLogger(Tracker):
    """Every metric at its step. SwanLab keeps the first value of a metric at a step: what is logged again after a resume
    is dropped there."""

    service = "swanlab"
    _config: SwanlabConfig

    @staticmethod
    def check(config: SwanlabConfig, context: LoggerContext) -> list[Problem]:
        """Options that SwanLab refuses; and online without a key, which the run could not begin without."""
        try:
            settings = swanlab.Settings(**_settings(config, context))
        except ValueError as error:
            return [Problem("", f"SwanLab refuses them: {why}. Fix: correct them") for why in reasons(error)]
        if (config.mode or settings.mode) not in ("online", "cloud") or settings.api_key:
            return []
        return [no_key("SwanLab", settings.api_host, *LOGIN)]

    def begin(self, run_id: str) -> Any:
        """On another thread: SwanLab takes SIGINT where it starts in the main thread, and Ctrl-C belongs to the training
        run."""
        return _within(self._config.init_timeout, "init_timeout", lambda: self._begin(run_id))

    def _begin(self, run_id: str) -> Any:
        settings = _settings(self._config, self._context)
        return swanlab.init(
            id=run_id,
            resume="allow",
            log_dir=str(self._folder.absolute()),
            config=dict(self._context.config),
            mode="online" if self._config.mode == "cloud" else self._config.mode,
            settings=swanlab.Settings(**settings),
        )

    def leaves_files(self, run: Any) -> bool:
        """Not with `mode: disabled`."""
        return bool(run.mode != "disabled")

    def end(self, run: Any, error: type[BaseException] | None) -> None:
        """As a crashed run where an error ends it."""
        end = {"state": "success"} if error is None else {"state": "crashed", "error": error.__name__}
        _within(self._config.finish_timeout, "finish_timeout", lambda: run.finish(**end))

    def log(self, run: Any, step: int, values: Mapping[str, Any]) -> None:
        """At SwanLab's own step."""
        run.log(dict(values), step=step)

    def shown(self, trajectories: Sequence[Trajectory]) -> Any:
        """The transcripts, each under its score."""
        return [swanlab.Text(transcript(one), f"score {one.score:g}, {one.stop_reason}") for one in trajectories]

    def picture(self, path: Path) -> Any:
        """SwanLab's image."""
        return swanlab.Image(str(path))

    def film(self, path: Path) -> Any:
        """SwanLab's video."""
        return swanlab.Video(str(path))


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
