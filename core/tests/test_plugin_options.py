"""Options of an implementation: checked against its signature or its config class, and given to what is built."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from turnwise.errors import PluginError
from turnwise.hookspecs import Implementation
from turnwise.plugins import Entry, Registry


class Plain:
    def __init__(self, config: None, context: Any, height: int, width: int = 2) -> None:
        self.context, self.size = context, (height, width)


class Anything:
    def __init__(self, config: None, context: Any, **options: Any) -> None:
        self.options = options


@frozen
class Sizes:
    height: int = 1


class Sized:
    def __init__(self, config: Sizes, context: Any) -> None:
        self.config = config


def known_with(*records: tuple[str, Implementation]) -> Registry:
    return Registry(entries=[Entry(kind, record, "hand", "turnwise-hand", "1") for kind, record in records])


def test_options_without_a_config_class_are_checked_against_the_signature() -> None:
    known = known_with(("logger", Implementation("plain", Plain)), ("logger", Implementation("any", Anything)))
    assert known.build("logger", "plain", {"height": 3}, "here").size == (3, 2)
    assert known.build("logger", "any", {"whatever": 1}).options == {"whatever": 1}
    with pytest.raises(
        PluginError,
        match=r"^logger 'plain' has no option 'hight'\. Did you mean 'height'\? .*height, width.* Fix: ",
    ):
        known.build("logger", "plain", {"hight": 3})
    with pytest.raises(PluginError, match=r"has no option 'context'"):
        known.build("logger", "plain", {"context": 3})
    with pytest.raises(PluginError, match=r"^logger 'plain' needs the option height\. Fix: write it\.$"):
        known.check_options(known.find("logger", "plain"), {"width": 3})


def test_environments_are_built_from_keyword_arguments() -> None:
    known = known_with(
        ("environment", Implementation("board", Sizes)), ("environment", Implementation("builtin", dict))
    )
    assert known.build("environment", "board", {"height": 4}).height == 4
    assert known.build("environment", "board").height == 1
    assert known.build("environment", "builtin", {"a": 1}) == {"a": 1}  # no signature to compare with
    with pytest.raises(
        PluginError, match=r"environment 'board' has no option 'heigth'\. Did you mean 'height'\? Its options: height\."
    ):
        known.build("environment", "board", {"heigth": 4})


def test_a_config_class_comes_with_its_defaults_where_nothing_is_given() -> None:
    known = known_with(("logger", Implementation("sized", Sized, Sizes)))
    assert known.build("logger", "sized").config == Sizes(1)
    assert known.build("logger", "sized", Sizes(5)).config.height == 5
