"""Finding the answer in a response: after the thinking, in the last box, or in the whole text."""

from __future__ import annotations

import re
import unicodedata

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def after_thinking(text: str) -> str:
    """`text` after its last `</think>`; nothing where thinking was begun and not ended."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer.strip()


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` that is closed, braces balanced; None without one."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for place in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[match.end() : place].strip()
    return None


def final(text: str) -> str:
    """What stands in the last box, else the whole text."""
    inside = boxed(text)
    return text.strip() if inside is None else inside


def normalised(text: str) -> str:
    """Lower case, one form of characters, single spaces, without full stops and quotes around it."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .\"'`")
