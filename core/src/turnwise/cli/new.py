"""`turnwise new`: a complete plugin distribution from the templates of its kind, small and working, its tests
included."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click
from attrs import frozen

from turnwise import __version__
from turnwise.errors import ConfigError, MachineError, did_you_mean, listed
from turnwise.hookspecs import KINDS

SUFFIX = ".txt"
"""Templates are `name.py.txt`, so that no tool takes them for modules; `{{name}}` and its like are replaced."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")


@frozen
class Template:
    """A kind of plugin: its short name on the command line, what the generated one does, how a YAML names it.

    `example`: whether the common example, which runs on the fakes of turnwise.testing, suits it. `needs`: requirements
    besides the core.
    """

    short: str
    summary: str
    use: str
    example: bool = True
    needs: tuple[str, ...] = ()


TEMPLATES = {
    "environment": Template("env", "guess a number", "custom_envs: {TAG: {env_type: {{name}}, max_steps: 3}}", False),
    "env_manager": Template(
        "env-manager",
        "every turn shows the current observation alone",
        "custom_envs: {TAG: {env_manager: {{name}}, …}}",
    ),
    "inference_backend": Template("backend", "plays one action, or the first legal one", "baselines: [{{name}}]"),
    "train_strategy": Template(
        "strategy", "a table of logits, trained on numpy", "actor_train: {strategy_args: {strategy_name: {{name}}}}"
    ),
    "advantage_estimator": Template(
        "estimator", "the score minus the mean score of the step", "adv_estimator: {{name}}"
    ),
    "policy_loss": Template("loss", "minus advantage times log-prob", "pg_variant: {{name}}", False, ("torch>=2.6",)),
    "batch_adjust": Template("batch-adjust", "one update of all rows", "batch_adjust_mode: {{name}}"),
    "group_filter": Template(
        "group-filter", "keeps the groups in which somebody succeeded", "group_filters: [{{name}}]"
    ),
    "logger": Template("logger", "the metrics as a CSV file", "track_with: [console, {{name}}]"),
    "runtime": Template("runtime", "another runtime with a clock", "runtime: {{name}}"),
    "model_source": Template(
        "model-source", "models in a local folder, by name and version", "model_source: {{name}}", False
    ),
}
"""Kind → its template. The files are in `templates/<kind>/` and `templates/common/`."""

# The examples of the other kinds compute with arrays.
WITH_NUMPY = frozenset(TEMPLATES) - {
    "environment",
    "inference_backend",
    "logger",
    "policy_loss",
    "runtime",
    "model_source",
}


def scaffold(kind: str, name: str, into: Path) -> None:
    """Write the distribution folder `into`/turnwise-NAME and print what to do next.

    Raises ConfigError (unknown kind, a name that cannot be one, a folder that exists) or MachineError (it cannot be
    written).
    """
    kind = resolve(kind)
    words = _words(kind, name)
    folder = into / words["distribution"]
    # It may be somebody's work.
    if folder.exists():
        raise ConfigError(
            f"{folder} exists already and is left as it is. Fix: another name, another --into, or remove the folder."
        )
    try:
        for path, text in rendered(kind, words).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error}. Fix: another --into.") from error
    click.echo(f"made {folder}: {kind.replace('_', ' ')} {words['name']!r}, {words['summary']}. Next:")
    click.echo(f"  pip install -e {folder}")
    click.echo(f"  turnwise test-plugin {words['name']}")
    click.echo(f"  in your YAML: plugins: [{words['distribution']}] and {fill(TEMPLATES[kind].use, words)}")


def resolve(kind: str) -> str:
    """The kind behind a short or full name, hyphens and underscores alike. Raises ConfigError with the nearest and all
    of them."""
    wanted = kind.strip().lower().replace("-", "_")
    known = {t.short.replace("-", "_"): full for full, t in TEMPLATES.items()} | {full: full for full in KINDS.values()}
    if wanted in known:
        return known[wanted]
    shorts = [t.short for t in TEMPLATES.values()]
    raise ConfigError(
        f"there is no kind of plugin {kind!r}.{did_you_mean(kind, [*shorts, *KINDS.values()])} Kinds: {listed(shorts)}."
        " Fix: one of them"
    )


def rendered(kind: str, words: dict[str, str]) -> dict[str, str]:
    """The distribution's files: path in its folder → text."""
    source, common = files("turnwise.cli") / "templates" / kind, files("turnwise.cli") / "templates" / "common"
    templates: list[Traversable] = [*source.iterdir(), common / f"pyproject.toml{SUFFIX}"]
    if TEMPLATES[kind].example:
        templates.append(common / f"example.yaml{SUFFIX}")
    out = {
        _place(t.name.removesuffix(SUFFIX), words): fill(t.read_text(encoding="utf-8"), words)
        for t in templates
        if t.name.endswith(SUFFIX)
    }
    # Type checkers read the annotations of an installed package only where this file says so.
    return out | {f"src/{words['module']}/py.typed": ""}


def fill(text: str, words: dict[str, str]) -> str:
    """`text` with every `{{word}}` replaced."""
    for word, value in words.items():
        text = text.replace("{{" + word + "}}", value)
    return text


def _place(name: str, words: dict[str, str]) -> str:
    """Where a template's file goes: modules under src, the test under tests, the rest into the folder itself."""
    if name == "test.py":
        return f"tests/test_{words['module'].removeprefix('turnwise_')}.py"
    return f"src/{words['module']}/{name}" if name.endswith(".py") else name


def _words(kind: str, name: str) -> dict[str, str]:
    """What the placeholders stand for. In the common example, every kind is `fake` but the one that is made."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the name {name!r} cannot name a package. Fix: letters, digits, - and _ alone, a letter first, such as"
            " my_game."
        )
    parts = [part.lower() for part in re.split("[-_]", name)]
    lower, upper = (int(n) for n in __version__.split(".")[:2])
    # Before 1.0 a minor version may change a contract: the plugin asks for the one that it was made with.
    needs = (
        f"turnwise>={lower}.{upper},<{lower}.{upper + 1}",
        *(("numpy>=1.26",) if kind in WITH_NUMPY else ()),
        *TEMPLATES[kind].needs,
    )
    yaml_name = "_".join(parts)
    return {
        **dict.fromkeys(TEMPLATES, "fake"),
        "runtime": "local",
        kind: yaml_name,
        "player": yaml_name if kind == "inference_backend" else "",
        "name": yaml_name,
        "distribution": "-".join(["turnwise", *parts]),
        "module": "_".join(["turnwise", *parts]),
        "Class": "".join(part[0].upper() + part[1:] for part in parts),
        "summary": TEMPLATES[kind].summary,
        "dependencies": ", ".join(f'"{need}"' for need in needs),
    }
