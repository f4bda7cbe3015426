"""What a plugin does that no plugin should: it is one broken plugin, never a traceback, an exit code of success or a
line on the output."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from turnwise.errors import PluginError, one_line
from turnwise.plugins import Registry

HEAD = "import turnwise\nfrom turnwise import Implementation\n"
HOOK = "@turnwise.hookimpl\ndef loggers():\n"

pytestmark = pytest.mark.usefixtures("modules_of_the_test_alone")


def declared(folder: Path, source: str, name: str = "mine.py") -> Registry:
    (folder / name).write_text(HEAD + source)
    known = Registry()
    known.declare([f"./{name}"], folder)
    return known


SHY = "class Shy(Exception):\n    def __str__(self):\n        raise ValueError('no')\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"{SHY}raise Shy\n", r"Shy: \(its message cannot be shown\)"),
        ("class Odd(BaseException):\n    pass\nraise Odd('odd')\n", "Odd: odd"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        ("import asyncio\nraise asyncio.CancelledError\n", "CancelledError"),
        ("raise GeneratorExit\n", "GeneratorExit"),
        (f"{HOOK}    raise SystemExit(0)\n", "hook 'loggers': SystemExit: 0"),
        (
            f"{HOOK}    return [Implementation('x', object, requires=(3,))]\n",
            "'x' whose requires holds 3; it must be text",
        ),
        (
            f"{HOOK}    return [Implementation('x', object, aliases=('a', None))]\n",
            "'x' whose aliases holds None; it must be text",
        ),
        (
            f"{HOOK}    return [Implementation('x', None)]\n",
            "'x' whose target is None; it must be a class, or 'module:Class'",
        ),
        (
            f"{HOOK}    return [Implementation('x', 'module.Class')]\n",
            "'x' whose target is 'module.Class'; it must be a class",
        ),
        (f"{HOOK}    return [Implementation('x', object, config=3)]\n", "'x' whose config is 3"),
        (
            f"{HOOK}    return [Implementation('x', object, config='m:Config')]\n".replace("loggers", "environments"),
            "'x' whose config is 'm:Config'; an environment's options are its constructor's keyword arguments",
        ),
        (f"{HOOK}    return [Implementation('x', object, presets=[1])]\n", r"'x' whose presets are \[1\]"),
        (
            f"{HOOK}    return [Implementation('x', object, presets={{'a': {{'b': object()}}}})]\n",
            "'x' whose presets are",
        ),
        (f"{HOOK}    return [Implementation('x', object, summary=3)]\n", "'x' whose summary is 3"),
    ],
)
def test_a_plugin_that_breaks_is_named_with_the_reason(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(PluginError, match=rf"'\./mine\.py' is broken: .*{words}.*\. Fix: correct or repair it"):
        declared(tmp_path, source)


def test_ctrl_c_while_a_plugin_is_imported_gets_through(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        declared(tmp_path, "raise KeyboardInterrupt\n")


def test_what_a_plugin_prints_does_not_stand_on_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"print('at import')\n{HOOK}    print('in a hook')\n    return [Implementation('x', object)]\n"
    declared(tmp_path, source)
    (tmp_path / "tw_chatty.py").write_text("print('when loaded')\nclass Log:\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    declared(tmp_path, f"{HOOK}    return [Implementation('x', 'tw_chatty:Log')]\n", "other.py").find(
        "logger", "x"
    ).target()
    sys.path.remove(str(tmp_path))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["at import", "in a hook", "when loaded"]


@pytest.mark.parametrize("target", ["tw_late:Log", "tw_late:missing", "tw_late:number"])
def test_a_target_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tw_late.py").write_text("number = 3\ndef __getattr__(name):\n    raise SystemExit(0)\n")
    entry = declared(tmp_path, f"{HOOK}    return [Implementation('x', '{target}')]\n").find("logger", "x")
    with pytest.raises(PluginError, match=r"logger 'x' \(from \./mine\.py\).*Fix: "):
        entry.target()


def test_a_distribution_without_a_name_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, metadata in enumerate(("", "Metadata-Version: 2.1\nVersion: 1\n", None)):
        info = tmp_path / f"tw_nameless{number}.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(f"[turnwise]\nnameless{number} = tw_nameless{number}\n")
        if metadata is not None:
            (info / "METADATA").write_text(metadata)
        (tmp_path / f"tw_nameless{number}.py").write_text(
            f"{HEAD}{HOOK}    return [Implementation('nameless{number}', object)]\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    known = Registry.discover()
    assert all(known.find("logger", f"nameless{number}") for number in range(3))
    with pytest.raises(PluginError, match="is not installed"):
        known.declare(["turnwise-nameless-things"])


def test_an_error_whose_text_raises_has_its_type() -> None:
    class Shy(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert one_line(Shy()) == "Shy: (its message cannot be shown)"


# ---------------------------------------------------------------- a plugin of several files


def neighbours(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / "helpers.py").write_text(
        "import words\nfrom . import words as same\nassert words is same\nclass Help:\n    word = words.WORD +"
        f" '{word}'\n"
    )
    (folder / "words.py").write_text("WORD = 'from '\n")
    (folder / "mine.py").write_text(
        f"{HEAD}import helpers\nfrom helpers import Help\nfrom .helpers import Help as Same\nassert Help is Same is"
        " helpers.Help\nclass Log(Help):\n    def later(self):\n        import later.deep\n        return"
        f" later.deep.NUMBER\n{HOOK}    return [Implementation('{word}', Log)]\n"
    )
    (folder / "later").mkdir()
    (folder / "later" / "__init__.py").write_text("")
    (folder / "later" / "deep.py").write_text(f"NUMBER = {len(word)}\n")
    return folder / "mine.py"


def test_a_single_file_imports_its_neighbours_and_two_folders_do_not_collide(tmp_path: Path) -> None:
    known = Registry()
    before = set(sys.modules)
    known.declare([str(neighbours(tmp_path / "one", "one")), str(neighbours(tmp_path / "two", "second"))], tmp_path)
    logs = {word: known.find("logger", word).target()() for word in ("one", "second")}
    assert {word: log.word for word, log in logs.items()} == {"one": "from one", "second": "from second"}
    assert {word: log.later() for word, log in logs.items()} == {"one": 3, "second": 6}
    assert {name for name in set(sys.modules) - before if not name.startswith("turnwise_file_")} == set()
    help_of_one = type(logs["one"]).__bases__[0]
    assert pickle.loads(pickle.dumps(help_of_one)) is help_of_one


def test_what_stands_beside_a_plugin_hides_no_installed_module_from_others(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("MINE = True\n")
    declared(tmp_path, f"import json\nassert json.MINE\n{HOOK}    return [Implementation('x', object)]\n")
    import json

    assert not hasattr(json, "MINE")


def test_an_installed_package_beside_a_plugin_stays_the_one_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tw_package").mkdir()
    (tmp_path / "tw_package" / "__init__.py").write_text("class Base:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import tw_package  # type: ignore[import-not-found]

    known = declared(
        tmp_path,
        f"import tw_package\nclass Log(tw_package.Base):\n    pass\n{HOOK}    return [Implementation('x', Log)]\n",
    )
    assert issubclass(known.find("logger", "x").target(), tw_package.Base)
