"""The plugin manager on tiny distributions: found by entry point or declared, isolated when broken, named in full when
something is wrong."""

from __future__ import annotations

import sys

import pytest
from plugin_files import GUESS, HOOK, Install

import turnwise
from turnwise.errors import PluginError
from turnwise.hookspecs import KINDS, Implementation
from turnwise.plugins import DISABLE, Registry

pytestmark = pytest.mark.usefixtures("modules_of_the_test_alone")


def why(known: Registry, plugin: str) -> str:
    """Why a plugin is broken."""
    return next(b.why for b in known.broken if b.plugin == plugin)


# ---------------------------------------------------------------- discovery and building


def test_an_installed_plugin_is_found_with_its_distribution_and_version(install: Install) -> None:
    install("turnwise-guess")
    entry = Registry.discover().find("environment", "guess")
    assert (entry.plugin, entry.distribution, entry.version, entry.status) == ("guess", "turnwise-guess", "1.2", "ok")
    assert entry.names == ("guess",)
    assert Registry.discover().build("environment", "guess", {"top": 3}).top == 3


def test_the_cores_own_runtime_comes_by_the_same_door() -> None:
    entry = Registry.discover().find("runtime", "local")
    assert entry.distribution == "turnwise"
    assert entry.target().__name__ == "LocalRuntime"


def test_every_kind_can_be_provided(install: Install) -> None:
    hooks = "".join(
        f'@turnwise.hookimpl\ndef {hook}():\n    return [Implementation("one", object)]\n' for hook in KINDS
    )
    install("turnwise-all", hooks)
    known = Registry.discover()
    assert not [b for b in known.broken if b.distribution == "turnwise-all"]
    assert [known.find(kind, "one").kind for kind in KINDS.values()] == list(KINDS.values())


def test_a_target_is_imported_when_it_is_built_and_not_before(install: Install) -> None:
    source = (
        '@turnwise.hookimpl\ndef loggers():\n    return [Implementation("lazy", "tw_lazy_target:Log",'
        ' config="tw_lazy_target:Options")]\n'
    )
    plugin = install("turnwise-lazy", source)
    heavy = (
        "import attrs\n\n@attrs.frozen\nclass Options:\n    every: int = 7\n\nclass Log:\n    def __init__(self,"
        " config, context):\n"
    )
    plugin.with_name("tw_lazy_target.py").write_text(heavy + "        self.config, self.context = config, context\n")
    known = Registry.discover()
    known.entries()
    assert known.find("logger", "lazy").status == "ok"
    assert "tw_lazy_target" not in sys.modules
    built = known.build("logger", "lazy", context="here")
    assert (built.config.every, built.context) == (7, "here")


def test_a_target_that_cannot_be_imported_names_the_plugin_and_chains_the_cause(install: Install) -> None:
    install(
        "turnwise-lazy",
        '@turnwise.hookimpl\ndef loggers():\n    return [Implementation("lazy", "tw_not_there.x:Log")]\n',
    )
    entry = Registry.discover().find("logger", "lazy")
    with pytest.raises(
        PluginError,
        match=r"logger 'lazy' \(from turnwise-lazy\) cannot be loaded from 'tw_not_there\.x:Log': ModuleNotFound",
    ) as caught:
        entry.target()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_missing_package_is_a_status_and_an_error_only_when_it_is_built(install: Install) -> None:
    source = (
        '@turnwise.hookimpl\ndef loggers():\n    return [Implementation("big", object, requires=("tw_absent", "json",'
        ' "tw_gone.deep"))]\n'
    )
    install("turnwise-big", source)
    entry = Registry.discover().find("logger", "big")
    assert (entry.missing, entry.status) == (("tw_absent", "tw_gone.deep"), "missing: tw_absent, tw_gone.deep")
    with pytest.raises(
        PluginError,
        match=r"logger 'big' \(from turnwise-big\) needs tw_absent, tw_gone\.deep, not installed\. Fix: pip install",
    ):
        entry.target()


def test_a_required_package_that_was_blocked_in_sys_modules_or_breaks_is_missing(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = install(
        "turnwise-big",
        '@turnwise.hookimpl\ndef loggers():\n    return [Implementation("big", object, requires=("tw_none",'
        ' "tw_odd.x"))]\n',
    )
    plugin.with_name("tw_odd.py").write_text("raise RuntimeError('odd')\n")
    monkeypatch.setitem(sys.modules, "tw_none", None)
    assert Registry.discover().find("logger", "big").missing == ("tw_none", "tw_odd.x")


def test_a_bare_text_is_one_alias_or_requirement() -> None:
    record = Implementation("x", object, requires="json", aliases="ex")  # type: ignore[arg-type]
    assert (record.requires, record.aliases) == (("json",), ("ex",))


# ---------------------------------------------------------------- what is broken stays apart


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tw_no_such_module\n", "ModuleNotFoundError: No module named 'tw_no_such_module'"),
        ("raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("x = = 1\n", "SyntaxError"),
        (HOOK + "1 / 0\n", "hook 'environments': ZeroDivisionError: division by zero"),
        (
            HOOK + "None\n",
            (
                "hook 'environments': TypeError: environments returned None; it must return a list of"
                " turnwise.Implementation"
            ),
        ),
        (
            HOOK + "['guess']\n",
            "hook 'environments': TypeError: environments returned 'guess' in its list; it must return a list",
        ),
        (HOOK + "Implementation('guess', object)\n", "it must return a list of turnwise.Implementation"),
        (
            HOOK + "[Implementation(object, 'guess')]\n",
            "an Implementation whose name is <class 'object'>; it must be text",
        ),
        (
            "@turnwise.hookimpl\ndef environment():\n    return []\n",
            "unknown hook 'environment'. Did you mean 'environments'? Hooks, each marked",
        ),
        (
            "def environments():\n    return []\n",
            "it has no hook. Hooks, each marked @turnwise.hookimpl: advantage_estimators,",
        ),
        ("@turnwise.hookimpl\ndef environments(registry):\n    return []\n", "PluginValidationError: "),
    ],
)
def test_a_broken_plugin_is_reported_and_disturbs_no_other(install: Install, source: str, expected: str) -> None:
    install("turnwise-guess")
    install("turnwise-bad", source, version="0.3")
    known = Registry.discover()
    assert [(b.plugin, b.distribution, b.version) for b in known.broken] == [("bad", "turnwise-bad", "0.3")]
    assert expected in why(known, "bad")
    assert "\n" not in why(known, "bad")
    assert known.find("environment", "guess").distribution == "turnwise-guess"
    assert not [e for e in known.entries() if e.distribution == "turnwise-bad"]


def test_a_plugin_with_one_bad_hook_provides_nothing_at_all(install: Install) -> None:
    install("turnwise-half", GUESS + "@turnwise.hookimpl\ndef loggers():\n    raise KeyError('x')\n")
    known = Registry.discover()
    assert why(known, "half") == "hook 'loggers': KeyError: 'x'"
    with pytest.raises(
        PluginError, match=r"no environment is named 'guess'\..* Broken: half \(hook 'loggers': KeyError: 'x'\)\."
    ) as caught:
        known.find("environment", "guess")
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_entry_point_that_is_no_module_is_broken(install: Install) -> None:
    install("turnwise-tuple", "thing = (1, 2)\n", entry=":thing")
    assert why(Registry.discover(), "tuple").startswith("it has no hook.")


def test_names_that_answer_to_everything_are_no_hooks(install: Install) -> None:
    install("turnwise-guess", "from unittest.mock import MagicMock, call\nmock = MagicMock()\n" + GUESS)
    known = Registry.discover()
    assert not known.broken
    assert known.find("environment", "guess").plugin == "guess"


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        ((f"turnwise>={turnwise.__version__}",), None),
        (("turnwise",), None),
        (("turnwise-torch>=99", "turnwise_other>=99"), None),
        (("turnwise>=99 ; extra == 'later'",), None),
        (("turnwise<99,>=98.5",), f"needs turnwise<99,>=98.5, this is {turnwise.__version__}"),
        (("Turnwise[testing]>=99",), f"needs turnwise>=99, this is {turnwise.__version__}"),
        (("turnwise => 1",), "its requirement 'turnwise => 1' cannot be read"),
    ],
)
def test_the_range_of_cores_that_a_plugin_admits_is_kept(
    install: Install, requires: tuple[str, ...], expected: str | None
) -> None:
    install("turnwise-guess", requires=requires)
    known = Registry.discover()
    assert [b.why for b in known.broken] == ([] if expected is None else [expected])
    assert ("tw_turnwise_guess" in sys.modules) == (expected is None)  # another core's plugin is not even imported


# ---------------------------------------------------------------- look-up


def test_an_unknown_name_gets_the_nearest_and_all_that_are_installed(install: Install) -> None:
    install("turnwise-guess", GUESS.replace('summary="guess a number"', 'aliases=("numbers",)'))
    known = Registry.discover()
    with pytest.raises(
        PluginError,
        match=r"^no environment is named 'gues'\. Did you mean 'guess'\? Installed: .*guess.* Fix: correct the name",
    ):
        known.find("environment", "gues")
    with pytest.raises(PluginError, match="Did you mean 'numbers'"):
        known.find("environment", "numbrs")
    with pytest.raises(PluginError, match=r"^no group filter is named 'guess'"):
        known.find("group_filter", "guess")


def test_an_alias_finds_the_implementation_of_its_kind_alone(install: Install) -> None:
    install("turnwise-guess", GUESS.replace('summary="guess a number"', 'aliases=("numbers",)'))
    known = Registry.discover()
    assert known.find("environment", "numbers").name == "guess"
    with pytest.raises(PluginError):
        known.find("logger", "numbers")


def test_a_duplicate_names_both_distributions_and_blocking_one_settles_it(install: Install) -> None:
    install("turnwise-guess")
    install("other-game", GUESS, version="7.0")
    known = Registry.discover()
    with pytest.raises(
        PluginError,
        match=(
            r"environment 'guess' is provided twice: by other-game 7\.0 and turnwise-guess 1\.2\. Fix: uninstall"
            r" one, or"
        ),
    ):
        known.find("environment", "guess")
    known.declare(["no:Other_Game"])
    assert known.find("environment", "guess").distribution == "turnwise-guess"


def test_an_alias_that_is_the_name_of_another_is_a_duplicate(install: Install) -> None:
    install("turnwise-guess")
    install("turnwise-riddle", HOOK + "[Implementation('riddle', object, aliases=('guess', 'riddle'))]\n")
    known = Registry.discover()
    with pytest.raises(
        PluginError, match=r"by turnwise-guess 1\.2 and turnwise-riddle 1\.2 \(an alias of 'riddle'\)\."
    ):
        known.find("environment", "guess")
    assert (
        known.find("environment", "riddle").distribution == "turnwise-riddle"
    )  # an alias that repeats the own name is none


def test_one_name_in_two_kinds_is_no_duplicate(install: Install) -> None:
    install(
        "turnwise-guess", GUESS + '@turnwise.hookimpl\ndef loggers():\n    return [Implementation("guess", object)]\n'
    )
    known = Registry.discover()
    assert {known.find(kind, "guess").kind for kind in ("environment", "logger")} == {"environment", "logger"}


@pytest.mark.parametrize("named", ["turnwise-guess", "guess", "GUESS", " turnwise_guess , nothing", "turnwise.guess"])
def test_the_environment_variable_blocks_by_name_and_the_module_is_not_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    install("turnwise-guess")
    monkeypatch.setenv(DISABLE, named)
    known = Registry.discover()
    assert "tw_turnwise_guess" not in sys.modules
    with pytest.raises(PluginError, match=r"Blocked: .*guess"):
        known.find("environment", "guess")


def test_a_broken_plugin_that_is_blocked_is_not_reported_any_more(install: Install) -> None:
    install("turnwise-bad", "raise RuntimeError('bad')\n")
    known = Registry.discover()
    known.declare(["no:bad"])
    with pytest.raises(PluginError) as caught:
        known.find("environment", "guess")
    assert "Broken: bad" not in str(caught.value)
    assert caught.value.__cause__ is None
