"""Whether a text has no room in a prompt, found without encoding much more of it than has room."""

from __future__ import annotations

from turnwise.contracts.chat import Chat
from turnwise.data.trajectory import int32

CHARACTERS = 16
"""A text of fewer characters for each token that has room is encoded as it is: few have so long tokens."""


def has_no_room(chat: Chat, text: str, longest: int) -> bool:
    """Whether `text` is certainly more than `longest` tokens. Time and memory go with `longest` tokens, however long
    the text is.

    Tokens are cut locally, so a text has about as many as its beginning, or more: twice the room is certain."""
    text = text.strip()  # which templates may leave out
    size = CHARACTERS * (longest + 1)
    while size < len(text):
        if len(chat.continue_text(int32([]), text[:size])) > 2 * longest:
            return True
        size *= 2
    return False
