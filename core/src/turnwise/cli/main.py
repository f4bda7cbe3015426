"""`turnwise`: train, eval, rollout, plan, check, plugins, new, test-plugin. Each command imports what it needs when it
runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from turnwise import __version__
from turnwise.errors import ConfigError, MachineError, PluginError, TurnwiseError, one_line

CONFIG_EXIT, MACHINE_EXIT = 2, 3


class Commands(click.Group):
    """A group whose errors are one line each; the traceback comes with --debug alone."""

    def invoke(self, ctx: click.Context) -> Any:  # Any: what the command returns, as click has it
        """Run the command and turn errors of Turnwise into lines and exit codes."""
        try:
            return super().invoke(ctx)
        except TurnwiseError as error:
            if ctx.params.get("debug"):
                raise
            for line in getattr(error, "besides", ()):
                click.echo(line, err=True)
            for line in str(error).split("\n"):
                click.echo(f"error: {line}", err=True)
            for note in getattr(error, "__notes__", ()):
                click.echo(note, err=True)
            sys.exit(exit_code(error))
        # No command ends so (click has an Exit of its own): code of a plugin did, and its status is none of ours.
        except SystemExit as error:
            if ctx.params.get("debug"):
                raise
            click.echo(
                f"error: code of a plugin ended the command by {one_line(error)}. Fix: it returns or raises; --debug"
                " shows where.",
                err=True,
            )
            sys.exit(1)


def exit_code(error: TurnwiseError) -> int:
    """2: the configuration or a plugin, 3: the machine, 1: anything that failed while running."""
    # 2 is click's own for a wrong command line, too.
    if isinstance(error, ConfigError | PluginError):
        return CONFIG_EXIT
    return MACHINE_EXIT if isinstance(error, MachineError) else 1


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="turnwise")
@click.option("--debug", is_flag=True, help="Show the whole traceback of an error.")
def main(debug: bool) -> None:
    """Train language-model agents by reinforcement learning over many turns."""


CONFIG = click.argument("config", type=click.Path(path_type=Path))
OVERRIDES = click.argument("overrides", nargs=-1)


@main.command()
@CONFIG
@OVERRIDES
def train(config: Path, overrides: tuple[str, ...]) -> None:
    """Train as CONFIG says. OVERRIDES are dotted: max_steps=10 actor_train.training_args.learning_rate=1e-5."""
    from turnwise.cli.run import train as run

    run(config, overrides)


@main.command("eval")
@CONFIG
@OVERRIDES
@click.option(
    "--model",
    default=None,
    help="A checkpoint, a model folder, or 'latest' (the run's newest checkpoint). Default: pretrain.",
)
@click.option("--player", default=None, help="An inference backend that plays instead, such as random.")
@click.option("--tag", default=None, help="One block of custom_envs instead of val_env_manager.tags.")
@click.option("--episodes", type=click.IntRange(min=1), default=None, help="How many tasks, one episode each.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
def evaluate(config: Path, overrides: tuple[str, ...], **options: Any) -> None:  # Any: click's options, by name
    """Play the evaluation tasks of CONFIG and print the metrics."""
    from turnwise.cli.run import evaluate as run

    run(config, overrides, **options)


@main.command()
@CONFIG
@OVERRIDES
@click.option("--model", default=None, help="A checkpoint, a model folder, or 'latest'. Default: pretrain.")
@click.option("--player", default=None, help="random, human, or another inference backend instead of the model.")
@click.option("--episodes", type=click.IntRange(min=1), default=1, show_default=True, help="How many episodes.")
@click.option(
    "--split", type=click.Choice(["train", "val"]), default="val", show_default=True, help="Whose environments."
)
@click.option("--tag", default=None, help="One block of custom_envs.")
@click.option("--seed", type=int, default=None, help="Seed of the tasks. Default: val_seed.")
@click.option("--render", type=click.Path(path_type=Path), default=None, help="Folder for the frames of the episodes.")
@click.option("--still", is_flag=True, help="With --render: one PNG a frame instead of a GIF an episode.")
@click.option(
    "--debug", "in_debugger", is_flag=True, help="One episode on the main thread, no timeouts: breakpoint() works."
)
def rollout(config: Path, overrides: tuple[str, ...], **options: Any) -> None:  # Any: click's options, by name
    """Play a few episodes of CONFIG and print them turn by turn."""
    from turnwise.cli.run import rollout as run

    run(config, overrides, **options)


@main.command()
@CONFIG
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option(
    "--from",
    "earlier",
    type=click.Path(path_type=Path),
    default=None,
    help="The output_dir of a run whose phase times give the total.",
)
@click.option(
    "--device-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=40,
    show_default=True,
    help="Memory of one device, in GB.",
)
def plan(config: Path, overrides: tuple[str, ...], **options: Any) -> None:  # Any: click's options, by name
    """Print the arithmetic of CONFIG: updates, learning rates, tokens, memory, disk, warnings. Needs no engine, device
    or weights."""
    from turnwise.cli.run import plan as run

    run(config, overrides, **options)


@main.command()
@CONFIG
@OVERRIDES
def check(config: Path, overrides: tuple[str, ...]) -> None:
    """Check all that can be known before CONFIG is trained. Exit code 2: the configuration, 3: this machine."""
    from turnwise.cli.run import check as run

    run(config, overrides)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def plugins(as_json: bool) -> None:
    """List every installed implementation with its kind, distribution, version and status."""
    from turnwise.cli.plugins import show

    show(as_json)


@main.command()
@click.argument("kind")
@click.argument("name")
@click.option(
    "--into", type=click.Path(path_type=Path), default=Path(), help="Folder in which the distribution's folder is made."
)
def new(kind: str, name: str, into: Path) -> None:
    """Scaffold a plugin distribution: KIND is env, estimator, loss, logger, … and NAME the name that the YAML will
    use."""
    from turnwise.cli.new import scaffold

    scaffold(kind, name, into)


@main.command("test-plugin")
@click.argument("name")
@click.option("--kind", default=None, help="The kind, where several implementations have this name.")
@click.option(
    "--plugin", "declared", multiple=True, help="A module or .py file to load first, as under plugins: in a YAML."
)
@click.option("--strict", is_flag=True, help="A skipped test fails.")
def test_plugin(name: str, kind: str | None, declared: tuple[str, ...], strict: bool) -> None:
    """Run the contract tests of a kind on the implementation NAME (or on everything in a .py file)."""
    from turnwise.cli.plugins import test

    raise click.exceptions.Exit(test(name, kind, declared, strict))


if __name__ == "__main__":
    main()
