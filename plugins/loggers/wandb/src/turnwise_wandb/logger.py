"""The wandb logger: one run of Weights & Biases for each training run, continued under its id when that is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.sdk import wandb_setup
from wandb.sdk.lib import wbauth

from turnwise.contracts.logger import LoggerContext
from turnwise.contracts.tracker import Tracker, no_key, plain, reasons, transcript
from turnwise.data.trajectory import Trajectory
from turnwise.errors import Problem
from turnwise_wandb.config import LOGIN, WandbConfig

STEP = "step"
"""The metric that charts have as their axis: W&B's own step never goes back, and that of a resumed run does."""
COLUMNS = ["tag", "task", "member", "role", "score", "success", "stop_reason", "turns", "transcript"]


class WandbLogger(Tracker):
    """A row of the run's history for each call. The history only grows: what is logged again after a resume comes after
    what it had."""

    service = "wandb"
    _config: WandbConfig

    @staticmethod
    def check(config: WandbConfig, context: LoggerContext) -> list[Problem]:
        """Options that W&B refuses; and online without a key, which it would ask for in the middle of the start."""
        try:
            own = wandb.Settings(**_settings(config))
        except ValueError as error:
            return [Problem("settings", f"W&B refuses them: {why}. Fix: correct them") for why in reasons(error)]
        known = wandb_setup.singleton().settings
        host = own.base_url if "base_url" in config.settings else known.base_url
        if (config.mode or known.mode) != "online" or _has_key(host):
            return []
        return [no_key("W&B", host, *LOGIN)]

    def begin(self, run_id: str) -> Any:
        """In a process of W&B's own."""
        config = self._config
        self._context.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            id=run_id,
            resume="allow",
            reinit="create_new",
            dir=str(self._context.folder.absolute()),  # its own process may stand in another folder
            config=dict(self._context.config),
            project=config.project,
            entity=config.entity,
            name=config.name or self._context.exp_name,
            tags=list(config.tags) or None,
            notes=config.notes,
            group=config.group,
            job_type=config.job_type,
            mode=config.mode,
            settings=wandb.Settings(**_settings(config)),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def leaves_files(self, run: Any) -> bool:
        """Not with `mode: disabled`."""
        return not run.disabled

    def end(self, run: Any, error: type[BaseException] | None) -> None:
        """With the exit code that the training run will have."""
        run.finish(exit_code=int(error is not None))

    def log(self, run: Any, step: int, values: Mapping[str, Any]) -> None:
        """One row of the history."""
        run.log({**values, STEP: step})

    def shown(self, trajectories: Sequence[Trajectory]) -> Any:
        """A table with a transcript in each row."""
        return wandb.Table(columns=COLUMNS, data=[_row(trajectory) for trajectory in trajectories])

    def picture(self, path: Path) -> Any:
        """W&B's image."""
        return wandb.Image(str(path))

    def film(self, path: Path) -> Any:
        """W&B's video."""
        return wandb.Video(str(path), format="gif")


def _has_key(host: str) -> bool:
    """Whether W&B would find one where it looks: its variables, the netrc file, its own settings."""
    try:
        return wbauth.authenticate_session(host=host, source="turnwise", prompt=False, update_session=False) is not None
    except wandb.errors.AuthenticationError:  # one that W&B cannot use
        return False


def _settings(config: WandbConfig) -> dict[str, Any]:
    """The command line, which may hold a key, and the code are not sent, and the terminal stays this program's own."""
    return {
        "console": "off",
        "save_code": False,
        "disable_code": True,
        "disable_git": True,
        "x_disable_meta": True,
        "x_save_requirements": False,
        # Copies: what a link points to may change, or stay behind where the folder is moved.
        "symlink": False,
        "x_disable_stats": not config.system_metrics,
        "x_disable_machine_info": not config.system_metrics,
        "init_timeout": config.init_timeout,
        "finish_timeout": config.finish_timeout,
        **config.settings,
    }


def _row(trajectory: Trajectory) -> list[Any]:
    """The columns of `COLUMNS`."""
    numbers = [int(trajectory.group), int(trajectory.member), trajectory.role, trajectory.score, trajectory.success]
    return [plain(trajectory.tag), *numbers, trajectory.stop_reason, len(trajectory.turns), transcript(trajectory)]
