"""The commands that work on a configuration: train, eval, rollout, plan, check."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from turnwise.config.loader import Loaded, load
from turnwise.config.masking import shown_override
from turnwise.config.schema import Choice
from turnwise.data.record import plain
from turnwise.data.transcript import readable
from turnwise.errors import ConfigError, Interrupted, OutOfMemory, TurnwiseError
from turnwise.pipeline import frames
from turnwise.pipeline import standalone as play
from turnwise.pipeline.run import Pipeline
from turnwise.planning import estimates, resume
from turnwise.planning import plan as planning
from turnwise.planning.chat_drift import drift_warnings
from turnwise.planning.device_problems import notes as device_notes
from turnwise.planning.preflight import Findings, preflight, refuse, schedule_problems
from turnwise.plugins import registry


def _loaded(
    path: Path, overrides: Sequence[str], notes: bool = False, planning: bool = False, checking: bool = False
) -> Loaded:
    """Load, and report the warnings; the notes on what was translated where somebody asks about the configuration
    itself."""
    loaded = load(path, overrides, planning=planning, checking=checking)
    for note in loaded.notes if notes else ():
        click.echo(f"note: {note}", err=True)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    return loaded


def _findings(loaded: Loaded, path: Path) -> Findings:
    """What is wrong before a start, with the place of the key where one is at fault."""
    found = preflight(loaded.config, path.parent, loaded.lacks, loaded.missing)
    return Findings([loaded.sources.placed(line) for line in found.config], found.machine)


def train(path: Path, overrides: Sequence[str]) -> None:
    """Train; an error says what was saved and how to go on."""
    # `checking`: what is missing here comes together with what preflight finds, and not alone.
    loaded = _loaded(path, overrides, checking=True)
    config = loaded.config
    refuse(_findings(loaded, path))
    for line in estimates.cpu_warnings(config, path.parent):
        click.echo(f"warning: {line}", err=True)
    logs = Path(config.logging_dir or config.output_dir)
    pipeline = Pipeline(config, path.parent, loaded.plain())
    # Not before preflight: a run that is refused leaves no folder behind.
    log = _log_to(logs)
    try:
        for note in loaded.notes:
            log.info("%s", note)
        outcome = asyncio.run(pipeline.run())
    except BaseException as error:  # sys.exit() in a plugin is a failure, too, whatever its status
        lines = [f"saved: {pipeline.progress.saved or 'nothing yet'}"]
        # What could not even be resumed is no advice.
        if pipeline.progress.saved is not None and pipeline.progress.first is not None:
            lines.append(f"resume: {_resume_command(path, overrides, pipeline)}")
        where = "\n".join(lines)
        if isinstance(error, Interrupted | KeyboardInterrupt):
            click.echo(f"{str(error) or 'stopped at once'}\n{where}", err=True)
            # 128 + SIGINT, as shells report it.
            raise click.exceptions.Exit(130) from None
        log.info("the run ended with an error", exc_info=error)
        if isinstance(error, OutOfMemory):
            raise OutOfMemory("; ".join([str(error), *lines])) from error
        if isinstance(error, TurnwiseError):
            error.add_note(where)
            raise
        unforeseen = _unforeseen(error, logs)
        unforeseen.add_note(where)
        raise unforeseen from error
    finally:
        _end_log(log)
    click.echo(outcome.report)
    if outcome.checkpoint is not None and config.val_env_manager is not None:
        click.echo(f"watch it play: {_command('rollout', path, overrides)} --model latest --episodes 3")


def _unforeseen(error: BaseException, logs: Path) -> TurnwiseError:
    """An error that nothing foresaw (of a plugin, or of the machine), as one line."""
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return TurnwiseError(f"the run failed: {what}. The traceback is in {logs / 'run.log'}.")


def _command(name: str, path: Path, overrides: Sequence[str]) -> str:
    # It stands on the terminal and in logs of jobs: who goes on writes a key again where `***` stands.
    return shlex.join([program(), name, str(path), *map(shown_override, overrides)])


def program() -> str:
    """How this shell calls `turnwise`: by its name, or by the path of a virtual environment that is not activated."""
    script = Path(sys.executable).with_name("turnwise")
    if shutil.which("turnwise") or not script.exists():
        return "turnwise"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def _resume_command(path: Path, overrides: Sequence[str], pipeline: Pipeline) -> str:
    """The command that goes on from `pipeline.progress.saved`: the newest checkpoint of the run, or one that it was
    itself resumed from."""
    newest = resume.listed(pipeline.folders.checkpoints)[-1:]
    which = "true" if newest == [pipeline.progress.saved] else str(pipeline.progress.saved)
    kept = [o for o in overrides if not o.startswith("resume_from_checkpoint=")]
    return _command("train", path, [*kept, f"resume_from_checkpoint={which}"])


class _LogFile(logging.FileHandler):
    """A log file that falls silent where it cannot be written (a full disk): the run does not depend on it, and reports
    its own end."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Leave the record out."""

    def close(self) -> None:
        """Close the file, whatever of it could still be written."""
        with contextlib.suppress(OSError):
            super().close()


def _log_to(folder: Path) -> logging.Logger:
    """Messages of the run go to `run.log`, warnings to the terminal too."""
    folder.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("turnwise")
    log.setLevel(logging.INFO)
    file = _LogFile(folder / "run.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers = [file, _terminal()]
    return log


def _terminal() -> logging.Handler:
    """Shows warnings, and what a user wants to read though nothing is wrong (turnwise.errors.NOTE)."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or "note" in vars(record))
    return handler


class _Lines(logging.Formatter):
    """`WARNING: …`, or `note: …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a warning's traceback would follow it."""
        return f"{'note' if 'note' in vars(record) else record.levelname}: {super().format(record)}"


@contextlib.contextmanager
def _messages() -> Iterator[None]:
    """Messages of what plays go to the terminal, where there is no folder for a log."""
    log = logging.getLogger("turnwise")
    log.setLevel(logging.INFO)
    log.handlers = [_terminal()]
    try:
        yield
    finally:
        _end_log(log)


def _end_log(log: logging.Logger) -> None:
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.NOTSET)


def evaluate(
    path: Path,
    overrides: Sequence[str],
    *,
    model: str | None,
    player: str | None,
    tag: str | None,
    episodes: int | None,
    as_json: bool,
) -> None:
    """Evaluate a model or a player."""
    loaded = _loaded(path, overrides)
    config = play.with_tasks(loaded.config, episodes=episodes, tag=tag)
    with _messages():
        played = asyncio.run(play.play(config, path.parent, player=_player(player), model=model))
    values = play.summary(config, played)
    if as_json:
        click.echo(json.dumps(plain(values), indent=1))
        return
    for name, value in values.items():
        click.echo(f"{name:<40} {value:.4g}")
    for line in played.failures:
        click.echo(f"failed: {line}", err=True)


def rollout(
    path: Path,
    overrides: Sequence[str],
    *,
    model: str | None,
    player: str | None,
    episodes: int,
    split: str,
    tag: str | None,
    seed: int | None,
    render: Path | None,
    still: bool,
    in_debugger: bool,
) -> None:
    """Play a few episodes and print them."""
    loaded = _loaded(path, overrides)
    config = play.with_tasks(loaded.config, episodes=episodes, tag=tag, split=split, seed=seed)
    if in_debugger:
        config = play.for_debugging(config)
    elif player == "human":
        config = play.patient(config)
    with _messages():
        played = asyncio.run(
            play.play(config, path.parent, player=_player(player), model=model, render=episodes if render else 0)
        )
    for trajectory in played.trajectories:
        click.echo(readable(trajectory))
    for line in played.failures:
        click.echo(f"failed: {line}", err=True)
    if render is not None:
        for _, file in frames.write(render, played.frames, still):
            click.echo(f"wrote {file}")


def _player(name: str | None) -> Choice | None:
    if name is None:
        return None
    # Looked up, so that an alias becomes the name, and a misspelt one an error with a hint.
    entry = registry().find("inference_backend", name)
    return Choice(entry.name)


def plan(path: Path, overrides: Sequence[str], *, as_json: bool, earlier: Path | None, device_gb: float) -> None:
    """Print the arithmetic of a run, and what it will need."""
    loaded = _loaded(path, overrides, notes=not as_json, planning=True)
    if wrong := schedule_problems(loaded.config):  # of which there is no arithmetic
        raise ConfigError([loaded.sources.placed(line) for line in wrong])
    values = planning.arithmetic(loaded.config)
    needs = estimates.estimates(loaded.config, path.parent, device_gb=device_gb, earlier=earlier)
    own = [*planning.warnings(loaded.config, values), *estimates.warnings(needs, loaded.config)]
    warnings = [*loaded.warnings, *own]
    meanings = planning.other_meanings(loaded.config) if loaded.foreign else []
    chosen = device_notes(loaded.config)
    if as_json:
        click.echo(
            json.dumps(
                {**values, **needs, "notes": [*loaded.notes, *chosen, *meanings], "warnings": warnings}, indent=1
            )
        )
        return
    click.echo(planning.render(values))
    click.echo(estimates.render(needs))
    for note in [*chosen, *meanings]:
        click.echo(f"note: {note}")
    for warning in own:
        click.echo(f"warning: {warning}")


def check(path: Path, overrides: Sequence[str]) -> None:
    """Report what is wrong with the configuration, and what this machine lacks."""
    loaded = _loaded(path, overrides, notes=True, checking=True)
    for note in device_notes(loaded.config):
        click.echo(f"note: {note}", err=True)
    findings = _findings(loaded, path)
    for line in findings.config:
        click.echo(f"config: {line}", err=True)
    for line in findings.machine:
        click.echo(f"machine: {line}", err=True)
    if findings.config or findings.machine:
        raise click.exceptions.Exit(2 if findings.config else 3)
    # Only now: to look for drift episodes are played, which takes a configuration that works.
    for line in [*estimates.cpu_warnings(loaded.config, path.parent), *drift_warnings(loaded.config, path.parent)]:
        click.echo(f"warning: {line}", err=True)
    click.echo(f"{path}: ready to train")
