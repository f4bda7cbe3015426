"""Plugins that a YAML names: files, modules and requirements, each there once, or missing with what to install."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from plugin_files import GUESS, HEADER, HOOK, Install

from turnwise.errors import PluginError
from turnwise.hookspecs import Implementation
from turnwise.plugins import Entry, Registry, registry, reset_registry

pytestmark = pytest.mark.usefixtures("modules_of_the_test_alone")


def test_a_single_file_beside_the_yaml_is_a_plugin_and_its_classes_pickle(tmp_path: Path) -> None:
    (tmp_path / "my env.py").write_text(HEADER + GUESS)
    known = Registry()
    known.declare(["./my env.py"], tmp_path)
    known.declare(["./my env.py", str(tmp_path / "my env.py")], tmp_path)  # once more does no harm
    built = known.build("environment", "guess", {"top": 4})
    assert pickle.loads(pickle.dumps(built)).top == 4
    assert known.find("environment", "guess").owner == "./my env.py"


def test_two_files_of_one_name_in_two_folders_are_two_plugins(tmp_path: Path) -> None:
    known, made = Registry(), []
    for folder, name in (("one", "guess"), ("two", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(HEADER + GUESS.replace('"guess"', f'"{name}"'))
        known.declare(["./env.py"], tmp_path / folder)
        made.append(known.build("environment", name))
    assert [type(pickle.loads(pickle.dumps(one))) for one in made] == [type(one) for one in made]


def test_a_module_is_a_plugin_dotted_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tw_games").mkdir()
    (tmp_path / "tw_games" / "__init__.py").write_text("")
    (tmp_path / "tw_games" / "guess.py").write_text(HEADER + GUESS)
    (tmp_path / "tw_flat.py").write_text(HEADER + GUESS.replace('"guess"', '"flat"'))
    known = Registry()
    known.declare(["tw_games.guess", "tw_flat", "tw_games.guess"])
    assert [e.name for e in known.entries()] == ["flat", "guess"]


def test_a_module_that_is_installed_and_named_is_there_once(install: Install) -> None:
    install("turnwise-guess")
    known = Registry.discover()
    known.declare(["tw_turnwise_guess", "turnwise-guess"])
    assert known.find("environment", "guess").distribution == "turnwise-guess"


@pytest.mark.parametrize(
    "wanted",
    [
        "turnwise-guess",
        "turnwise_guess>=1.0",
        "Turnwise.Guess~=1.2",
        "turnwise-guess[extra]",
        "turnwise-old; python_version<'3'",
    ],
)
def test_a_requirement_that_is_met_says_nothing(
    install: Install, wanted: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    if "python_version" not in wanted:  # of another Python's, nothing is wanted
        with pytest.raises(PluginError, match="is not installed"):
            Registry.discover().declare([wanted])
    install("turnwise-guess")
    known = Registry.discover()
    known.declare([wanted])
    assert known.find("environment", "guess").distribution == "turnwise-guess"
    assert (*capsys.readouterr(), caplog.records) == ("", "", [])


def test_everything_that_is_missing_is_reported_at_once_with_one_pip_command(install: Install, tmp_path: Path) -> None:
    install("turnwise-guess")
    (tmp_path / "torn.py").write_text("import tw_gone\n")
    wanted = [
        "turnwise-gues",
        "turnwise-guess>=2",
        "tw_no.such",
        "./absent.py",
        "./torn.py",
        "what is this?",
        "turnwise-guess",
        "absent-dist==1",
    ]
    with pytest.raises(PluginError) as caught:
        Registry.discover().declare(wanted, tmp_path)
    text = str(caught.value)
    assert text.startswith(
        "plugins: 'turnwise-gues' is not installed (did you mean 'turnwise-guess'?); 'turnwise-guess' 1.2 is installed,"
        " 'turnwise-guess>=2'"
    )
    assert (
        "; the module 'tw_no.such' is not installed; the file './absent.py' does not exist; './torn.py' is broken:"
        " ModuleNotFoundError" in text
    )
    assert "; 'what is this?' is not a requirement, a module or a .py file (" in text
    fix = "Fix: pip install --find-links dist 'turnwise-gues' 'turnwise-guess>=2' 'absent-dist==1' (dist: "
    assert f"; 'absent-dist' is not installed. {fix}" in text
    assert "\n" not in text
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_module_whose_own_import_fails_is_broken_and_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tw_needs.py").write_text("import tw_gone\n")
    with pytest.raises(
        PluginError,
        match=r"'tw_needs' is broken: ModuleNotFoundError: No module named 'tw_gone'\. Fix: correct or repair",
    ):
        Registry().declare(["tw_needs"])


def test_declaring_a_broken_plugin_chains_what_it_raised(install: Install, tmp_path: Path) -> None:
    install("turnwise-bad", "raise LookupError('no disk')\n")
    with pytest.raises(
        PluginError, match=r"^plugins: 'turnwise-bad' is broken: LookupError: no disk\. Fix: correct or repair"
    ) as caught:
        Registry.discover().declare(["turnwise-bad"])
    assert isinstance(caught.value.__cause__, LookupError)
    (tmp_path / "hook.py").write_text(HEADER + HOOK + "1 / 0\n")
    with pytest.raises(
        PluginError, match=r"^plugins: './hook.py' is broken: hook 'environments': ZeroDivisionError"
    ) as caught:
        Registry().declare(["./hook.py"], tmp_path)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    (tmp_path / "exits.py").write_text("raise SystemExit\n")
    with pytest.raises(PluginError, match="SystemExit"):
        Registry().declare(["./exits.py"], tmp_path)
    assert not [name for name in sys.modules if name.startswith("turnwise_file_") and name.endswith(".exits")]


def test_the_process_has_one_registry_until_it_is_reset() -> None:
    reset_registry()
    first = registry()
    assert registry() is first
    reset_registry()
    assert registry() is not first
    reset_registry()


def test_the_owner_of_a_file_has_no_version() -> None:
    assert Entry("logger", Implementation("x", object), "f", "./f.py", "").owner == "./f.py"
    assert Entry("logger", Implementation("x", object), "d", "dist", "1.0").owner == "dist 1.0"
