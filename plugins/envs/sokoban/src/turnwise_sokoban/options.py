"""Checks of the options of `sokoban`: each returns the value as it is used, or raises ConfigError with the fix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError, did_you_mean
from turnwise_sokoban.rooms import BOX, BOX_ON_TARGET, FLOOR, PLAYER, PLAYER_ON_TARGET, TARGET, WALL

SYMBOLS = {WALL: "#", FLOOR: "_", TARGET: "O", BOX_ON_TARGET: "√", BOX: "X", PLAYER: "P", PLAYER_ON_TARGET: "S"}
WORDS = {
    WALL: "wall",
    FLOOR: "empty",
    TARGET: "target",
    BOX_ON_TARGET: "box on target",
    BOX: "box",
    PLAYER: "player",
    PLAYER_ON_TARGET: "player on target",
}


def integer(name: str, value: Any, least: int) -> int:
    """An integer of at least `least`."""
    # A bool is an int to Python, and YAML reads an unquoted `yes` as one.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}, sokoban. Fix: an integer of at least {least}.")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, sokoban. Fix: true or false.")
    return value


def penalty(name: str, value: Any) -> float:
    """A finite number of at most 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 0:
        raise ConfigError(
            f"{name} is {value!r}, sokoban; it is added to the reward. Fix: a number of at most 0, as -0.1."
        )
    return float(value)


def choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    """One of `known`."""
    if value not in known:
        raise ConfigError(
            f"{name} is {value!r}, sokoban.{did_you_mean(str(value), known)} Fix: one of {', '.join(known)}."
        )
    return str(value)


def separator(value: Any) -> str:
    """A text that separates moves and is no part of one."""
    if not isinstance(value, str) or not value.strip() or any(c.isalpha() for c in value):
        raise ConfigError(
            f"action_separator is {value!r}, sokoban. Fix: a text with no letters that is not only white space, as"
            " '||'."
        )
    return value


def dimensions(value: Any) -> tuple[int, int]:
    """(height, width), outer walls included: a pull needs three cells in a row."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if (
        len(pair) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or not 3 <= n <= 100 for n in pair)
        or max(pair) < 5
    ):
        raise ConfigError(
            f"dim_room is {value!r}, sokoban. Fix: [height, width], both from 3 to 100 and one of them at least 5, as"
            " [6, 6]."
        )
    return pair[0], pair[1]


def symbols(value: Any) -> dict[int, str]:
    """The symbol of each code; those that `grid_lookup` leaves out keep the usual one."""
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"grid_lookup is {value!r}, sokoban. Fix: a mapping from 0…6 to symbols, as {{0: '#', 1: '_'}}."
        )
    chosen = dict(SYMBOLS)
    for key, symbol in given.items():
        code = int(key) if str(key).isdecimal() else -1
        if code not in SYMBOLS:
            raise ConfigError(
                f"grid_lookup has the key {key!r}, sokoban. Fix:"
                f" {', '.join(f'{n} ({word})' for n, word in WORDS.items())}."
            )
        chosen[code] = str(symbol)
    if len(set(chosen.values())) < len(chosen) or any(
        not symbol.strip() or "\n" in symbol for symbol in chosen.values()
    ):
        raise ConfigError(
            f"grid_lookup gives the symbols {list(chosen.values())}, sokoban. Fix: seven different symbols that can be"
            " seen."
        )
    return chosen


def vocabulary(value: Any, chosen: dict[int, str]) -> dict[str, str]:
    """The word of each symbol; those that `grid_vocab` leaves out keep the usual one."""
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise ConfigError(f"grid_vocab is {value!r}, sokoban. Fix: a mapping from symbols to words, as {{'#': wall}}.")
    words = {symbol: WORDS[code] for code, symbol in chosen.items()}
    for symbol, word in given.items():
        if str(symbol) not in words:
            raise ConfigError(
                f"grid_vocab has the symbol {symbol!r}, sokoban, which grid_lookup does not use. Fix: one of"
                f" {' '.join(words)}."
            )
        words[str(symbol)] = str(word)
    return words
