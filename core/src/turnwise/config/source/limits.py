"""How much a configuration may hold. What is larger is a slip or an attack, and is refused before it takes memory or
minutes."""

from __future__ import annotations

from typing import Any

LARGEST_FILE = 512 * 1024
"""Bytes of one file: a megabyte takes the parser ten seconds."""
MOST_VALUES = 10_000
"""Keys and elements, with every alias and every `${…}` written out: ten aliases of ten aliases of ten … fit on a page."""
MOST_MERGED = 20 * MOST_VALUES
"""Pairs that `<<` brings in one file, before equal keys fall together."""
DEEPEST = 64
"""Blocks inside blocks: the libraries that hold a configuration recurse, and 300 end in a RecursionError."""
MOST_FILES = 100
"""Files that `defaults:` reads; one that is named twice counts twice."""
LONGEST_TEXT = 256 * 1024
"""Characters of one text, and of all that `${…}` makes together."""
LARGEST_NUMBER = 10**300
"""Whole numbers below fit a float, and can be shown."""


def refusal(value: Any) -> str:  # Any: a YAML's data
    """Why a single value can stand nowhere in a configuration, with the fix; the empty string where it can."""
    if isinstance(value, str):
        if "\0" in value:
            return "the text holds a NUL character, which neither a path nor a variable can. Fix: remove the \\0"
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            return "the text holds half of a surrogate pair, which no file can. Fix: write the character itself"
        if len(value) > LONGEST_TEXT:
            return (
                f"the text has {len(value)} characters, {LONGEST_TEXT} are the most. Fix: shorten it, or give the name"
                " of a file"
            )
    if isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        return "the number has more than 300 digits. Fix: write a smaller one"
    return ""
