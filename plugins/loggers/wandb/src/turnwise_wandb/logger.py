"""The wandb logger: one run of Weights & Biases for each training run, continued under its id when that is resumed."""

from __future__ import annotations

import glob
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.sdk import wandb_setup
from wandb.sdk.lib import wbauth

from turnwise.contracts.logger import LoggerContext
from turnwise.data.trajectory import Trajectory
from turnwise.data.transcript import readable
from turnwise.errors import Problem
from turnwise_wandb.config import WandbConfig

STEP = "step"
"""The metric that charts have as their axis: W&B's own step never goes back, and that of a resumed run does."""
COLUMNS = ["tag", "task", "member", "role", "score", "success", "stop_reason", "turns", "transcript"]


class WandbLogger:
    """Local files lie in `wandb/` below the run's folder, with the id of the run in `turnwise_run_id`."""

    def __init__(self, config: WandbConfig, context: LoggerContext) -> None:
        self._config = config
        self._context = context
        self._kept_id = context.folder / "wandb" / "turnwise_run_id"
        self._id: str | None = None
        self._run: Any = None

    @staticmethod
    def check(config: WandbConfig, context: LoggerContext) -> list[Problem]:
        """Options that W&B refuses; and online without a key, which it would ask for in the middle of the start."""
        try:
            own = wandb.Settings(**_settings(config))
        except ValueError as error:
            return [Problem("settings", f"W&B refuses them: {why}. Fix: correct them") for why in _reasons(error)]
        known = wandb_setup.singleton().settings
        host = own.base_url if "base_url" in config.settings else known.base_url
        if (config.mode or known.mode) != "online" or _has_key(host):
            return []
        lack = f"online, and there is no W&B key for {host} on this machine"
        fix = "Fix: wandb login, or the environment variable WANDB_API_KEY, or mode: offline"
        return [Problem("mode", f"{lack}. {fix}", machine=True)]

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of the run's history; NaN and infinities are kept."""
        if metrics:
            self._log(step, {name: float(value) for name, value in metrics.items()})

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """The first of them as a table, each with its transcript."""
        shown = trajectories[: self._config.trajectories]
        if shown and (split != "train" or step % self._config.every == 0):
            table = wandb.Table(columns=COLUMNS, data=[_row(trajectory) for trajectory in shown])
            self._log(step, {f"trajectories/{split}": table})

    def artifact(self, step: int, name: str, path: Path) -> None:
        """A picture in the history; any other file among the run's files."""
        suffix = path.suffix.lower()
        if suffix in (".png", ".jpg", ".jpeg"):
            self._log(step, {name: wandb.Image(str(path))})
        elif suffix == ".gif":
            self._log(step, {name: wandb.Video(str(path), format="gif")})
        else:
            self._open().save(glob.escape(str(path)), base_path=str(path.parent), policy="now")

    def resume(self, step: int) -> None:
        """Begin a run, or go on with the one of this folder. W&B's history only grows: what it holds of `step` and later
        stays, and what is logged again for these steps comes after it."""
        self.close()
        self._id = self._kept_id.read_text(encoding="utf-8") if step > 0 and self._kept_id.exists() else None
        self._open()

    def close(self) -> None:
        """End the run, as a failed one where an error ends it; may be called twice."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=int(sys.exc_info()[1] is not None))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._open().log({**values, STEP: step})

    def _open(self) -> Any:
        """The run; begun now if it is not, and continued if it was closed."""
        if self._run is None:
            config = self._config
            self._id = self._id or secrets.token_hex(6)
            self._context.folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                id=self._id,
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
            if not self._run.disabled:
                self._kept_id.parent.mkdir(parents=True, exist_ok=True)
                self._kept_id.write_text(self._id, encoding="utf-8")
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)
        return self._run


def _has_key(host: str) -> bool:
    """Whether W&B would find one where it looks: its variables, the netrc file, its own settings."""
    try:
        return wbauth.authenticate_session(host=host, source="turnwise", prompt=False, update_session=False) is not None
    except wandb.errors.AuthenticationError:  # one that W&B cannot use
        return False


def _reasons(error: ValueError) -> list[str]:
    """Which settings are wrong, without their values."""
    found = error.errors() if hasattr(error, "errors") else [{"loc": (), "msg": str(error)}]
    return [": ".join([*map(str, one["loc"]), str(one["msg"])]) for one in found]


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
    """The columns of `COLUMNS`; a lone surrogate, which no table takes, becomes its escape."""
    text = readable(trajectory).encode("utf-8", "backslashreplace").decode("utf-8")
    tag = trajectory.tag.encode("utf-8", "backslashreplace").decode("utf-8")
    numbers = [int(trajectory.group), int(trajectory.member), trajectory.role, trajectory.score, trajectory.success]
    return [tag, *numbers, trajectory.stop_reason, len(trajectory.turns), text]
