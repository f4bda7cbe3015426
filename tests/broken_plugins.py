"""Broken plugins: `python tests/broken_plugins.py` names each in a configuration for `plan` and `check`, and prints
what should not be.

Each is one file beside the configuration that chooses what the file gives. The answer is a line that names the plugin
and the fix, never a traceback, a success that is none, a hang, or a word of the plugin's on the output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from judged import judge_all
from mutated_values import BASE
from mutated_yamls import judge_command

from turnwise.plugins import reset_registry

HEAD = """\
import attrs
import turnwise
from attrs import field, frozen
from turnwise import Implementation
from turnwise.errors import Problem
from turnwise.testing.fakes import FakeBackend, FakeEnvironment, FakeEnvManager, FakeEstimator, FakeStrategy

"""
CHOSEN = {
    "loggers": "track_with=[mine]",
    "environments": "custom_envs.Count={env_type: mine, env_config: {}}",
    "env_managers": "custom_envs.Count.env_manager=mine",
    "train_strategies": "actor_train.strategy_args={strategy_name: mine}",
    "inference_backends": "actor_infer.strategy_args={strategy_name: mine}",
    "advantage_estimators": "adv_estimator=mine",
    "policy_losses": "pg_variant=mine",
    "group_filters": "group_filters=[mine]",
    "batch_adjusts": "batch_adjust_mode=mine",
    "runtimes": "runtime=mine",
    "model_sources": "model_source=mine",
}
"""Hook → the override that names its implementation `mine`."""


@frozen
class Broken:
    """A plugin: its file, and the hook whose implementation the configuration names. `fine`: odd, and nothing is
    wrong."""

    name: str
    source: str
    hook: str
    fine: bool = False


def hooked(record: str, hook: str = "loggers", before: str = "") -> str:
    """A file with one hook that returns `record`."""
    return f"{HEAD}{before}\n@turnwise.hookimpl\ndef {hook}():\n    return {record}\n"


def given(target: str, hook: str = "loggers", before: str = "", more: str = "") -> str:
    """A file that gives one implementation, named mine."""
    return hooked(f"[Implementation('mine', {target}{more})]", hook, before)


SHY = "class Shy(Exception):\n    def __str__(self):\n        raise ValueError('no')\n    __repr__ = __str__\n"
AT_IMPORT = {
    "a syntax error": "def f(:\n",
    "a tab among spaces": "if True:\n        x = 1\n\ty = 2\n",
    "a missing module": "import no_such_module_anywhere\n",
    "a name that is not there": "from turnwise import NoSuchName\n",
    "an exception": "raise ValueError('broken\\non two lines')\n",
    "an exception whose text raises": f"{SHY}raise Shy\n",
    "sys.exit(0)": "import sys\nsys.exit(0)\n",
    "sys.exit with a text": "raise SystemExit('bye')\n",
    "a BaseException": "class Odd(BaseException):\n    pass\nraise Odd('odd')\n",
    "a cancellation": "import asyncio\nraise asyncio.CancelledError\n",
    "a GeneratorExit": "raise GeneratorExit\n",
    "an endless recursion": "def f():\n    return f()\nf()\n",
    "a MemoryError": "raise MemoryError\n",
    "an import of itself": "import mine\nmine.nothing\n",
    "an assertion": "assert False\n",
    "bytes that are no text": "x = '\\udcff'\nraise ValueError(x)\n",
    "nothing at all": "",
    "no hook": "x = 1\n",
    "a NUL": "x = 1\0\n",
    "an empty exception group": "raise BaseExceptionGroup('several', [SystemExit(0)])\n",
    "a StopIteration": "raise StopIteration\n",
    "an exception of 10⁶ characters": "raise ValueError('x' * 1_000_000)\n",
}
IN_A_HOOK = {
    "None": "None",
    "text": "'mine'",
    "a number": "3",
    "a list of numbers": "[3]",
    "a class": "[object]",
    "a generator": "(x for x in ())",
    "an exit": "exit(0)",
    "a division by zero": "1 / 0",
    "a dictionary": "{'mine': object}",
}
RECORDS = {
    "a name that is a number": "[Implementation(3, object)]",
    "no name": "[Implementation('', object)]",
    "no target": "[Implementation('mine', None)]",
    "a target that is a number": "[Implementation('mine', 3)]",
    "a target without a colon": "[Implementation('mine', 'mine.Log')]",
    "requires a number": "[Implementation('mine', object, requires=(3,))]",
    "requires None": "[Implementation('mine', object, requires=None)]",
    "aliases of numbers": "[Implementation('mine', object, aliases=(1, 2))]",
    "presets as a list": "[Implementation('mine', object, presets=[1])]",
    "presets of objects": "[Implementation('mine', object, presets={'x': {'y': object()}})]",
    "a config that is a number": "[Implementation('mine', object, config=3)]",
    "fixtures that are a number": "[Implementation('mine', object, fixtures=3)]",
    "the same twice": "[Implementation('mine', object), Implementation('mine', object)]",
    "an argument that is not there": "[Implementation('mine', object, nothing=1)]",
    "a module that is not there": "[Implementation('mine', 'no_such_module:Log')]",
    "a class that is not there": "[Implementation('mine', 'json:NoSuchClass')]",
    "a target that is a module's number": "[Implementation('mine', 'json.decoder:NaN')]",
    "a package that is missing": "[Implementation('mine', object, requires=('no_such_package',))]",
    "a config that is no attrs class": "[Implementation('mine', object, config=dict)]",
    "a config that is not there": "[Implementation('mine', object, config='json:Nothing')]",
}
OPTIONS = {
    "a required option": "@frozen\nclass C:\n    x: int\n",
    "a default that raises": "def f():\n    raise KeyError('x')\n@frozen\nclass C:\n    x: int = field(factory=f)\n",
    "a default that exits": "def f():\n    raise SystemExit(0)\n@frozen\nclass C:\n    x: int = field(factory=f)\n",
    "a validator that raises": (
        "def f(*_):\n    raise RuntimeError('no')\n@frozen\nclass C:\n    x: int = field(default=1, validator=f)\n"
    ),
    "a validator whose error has no text": (
        f"{SHY}def f(*_):\n    raise Shy\n@frozen\nclass C:\n    x: int = field(default=1, validator=f)\n"
    ),
    "a type that is not there": "@frozen\nclass C:\n    x: 'Nothing' = 1\n",
    "a check that raises": "@frozen\nclass C:\n    def check(self, run):\n        raise RuntimeError('no')\n",
    "a check that exits": "@frozen\nclass C:\n    def check(self, run):\n        raise SystemExit(0)\n",
    "a check that gives text": "@frozen\nclass C:\n    def check(self, run):\n        return ['wrong']\n",
    "a check that gives None": "@frozen\nclass C:\n    def check(self, run):\n        return None\n",
    "capabilities that raise": (
        "@frozen\nclass C:\n    @property\n    def capabilities(self):\n        raise RuntimeError('no')\n"
    ),
    "capabilities that are a number": "@frozen\nclass C:\n    capabilities = 3\n",
}
STRATEGIES = {
    "no method at all": "object",
    "a check that raises": "type('S', (FakeStrategy,), {'check': classmethod(lambda cls, config, context: 1 / 0)})",
    "a check that exits": "type('S', (FakeStrategy,), {'check': classmethod(lambda cls, config, context: exit(0))})",
    "a check that gives text": (
        "type('S', (FakeStrategy,), {'check': classmethod(lambda cls, config, context: ['wrong'])})"
    ),
    "a check that gives None": "type('S', (FakeStrategy,), {'check': classmethod(lambda cls, config, context: None)})",
    "capabilities that are a number": "type('S', (FakeStrategy,), {'capabilities': 3})",
}
CONSTRUCTED = (
    "loggers",
    "env_managers",
    "advantage_estimators",
    "environments",
    "batch_adjusts",
    "group_filters",
    "model_sources",
    "runtimes",
)
BUILDERS = {
    "whose constructor raises": "class T:\n    def __init__(self, *a, **k):\n        raise RuntimeError('no')\n",
    "whose constructor exits": "class T:\n    def __init__(self, *a, **k):\n        raise SystemExit(0)\n",
}


def broken() -> Iterator[Broken]:
    """All of them."""
    for name, source in AT_IMPORT.items():
        yield Broken(f"import: {name}", source, "loggers")
    for name, record in IN_A_HOOK.items():
        yield Broken(f"hook: {name}", hooked(record), "loggers")
    for name, record in RECORDS.items():
        yield Broken(f"record: {name}", hooked(record), "loggers")
    for name, options in OPTIONS.items():
        hook, target = (
            ("train_strategies", "FakeStrategy")
            if "capabilities" in name
            else ("advantage_estimators", "FakeEstimator")
        )
        yield Broken(f"options: {name}", given(target, hook, options, ", config=C"), hook)
    for name, target in STRATEGIES.items():
        yield Broken(f"strategy: {name}", given(target, "train_strategies"), "train_strategies")
        yield Broken(
            f"backend: {name}",
            given(target.replace("FakeStrategy", "FakeBackend"), "inference_backends"),
            "inference_backends",
        )
    for name, source in BUILDERS.items():
        for hook in CONSTRUCTED:
            late = hook in ("loggers", "runtimes")  # built when a run starts: they open files and take devices
            yield Broken(f"{hook}: {name}", given("T", hook, source), hook, fine=late)
    yield Broken("a misspelt hook", hooked("[]", "logers"), "loggers")
    yield Broken("a hook with an argument", f"{HEAD}@turnwise.hookimpl\ndef loggers(x):\n    return []\n", "loggers")
    yield Broken(
        "prints everywhere",
        "print('import')\n" + given("T", "advantage_estimators", PRINTING),
        "advantage_estimators",
        fine=True,
    )


PRINTING = """\
class T(FakeEstimator):
    print("class")
    def __init__(self, *a, **k):
        print("constructor")
        super().__init__(*a, **k)
"""


def judge(one: Broken) -> list[str]:
    """What should not be, of a plugin in the current folder."""
    Path("mine.py").write_bytes(one.source.encode("utf-8", "surrogatepass"))
    Path("run.yaml").write_text(BASE, encoding="utf-8")
    reset_registry()
    overrides = ("plugins=[turnwise.testing.plugin, ./mine.py]", CHOSEN[one.hook])
    faults = list(judge_command(["plan", "--json"], overrides, False))
    return [*faults, *judge_command(["check"], overrides, not one.fine)]


if __name__ == "__main__":
    sys.exit(1 if judge_all("broken plugins", broken(), judge) else 0)
