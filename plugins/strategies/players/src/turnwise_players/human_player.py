"""The human player: the end of the conversation on the terminal, one line from the keyboard as the answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.player import Player, chosen
from turnwise.data.trajectory import Generation
from turnwise.errors import TurnwiseError
from turnwise_players.config import HumanConfig


class PlayerLeft(TurnwiseError):
    """The human ended the game: by `q`, or by the end of the input."""


class HumanPlayer(Player):
    """One question at a time, whatever the number of episodes. `reader` and `writer`: the terminal unless a test gives
    others."""

    def __init__(
        self,
        config: HumanConfig,
        context: InferenceContext | None,
        reader: TextIO | None = None,
        writer: TextIO | None = None,
    ) -> None:
        self._config = config
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._left = False

    async def generate(self, request: Request) -> Generation:
        """What the human typed. Raises PlayerLeft (a TurnwiseError) after `q` or the end of the input, now and from
        then on."""
        # One keyboard for all episodes.
        async with self._turn:
            if self._left:
                raise PlayerLeft("the human player left the game")
            self._print(render(request, self._config.show) + "\n> ", end="")
            line = await self._read()
            if not line or line.strip().lower() == "q":
                # For good: the other episodes would ask a human who has gone, one after the other.
                self._left = True
                raise PlayerLeft("the human player left the game")
            return chosen(line.rstrip("\r\n"))

    async def _read(self) -> str:
        """One line, read in a daemon thread: a thread that waits for the keyboard can be left behind, at Ctrl-C as
        well."""
        loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def deliver(line: str, error: BaseException | None) -> None:
            # The request may have been given up while the human was typing.
            if not result.done():
                result.set_exception(error) if error else result.set_result(line)

        def read() -> None:
            line, error = "", None
            try:
                line = self._reader.readline() if self._reader else _readline()
            except (OSError, ValueError) as caught:
                error = TurnwiseError(f"cannot read the human player's answer: {caught}. Fix: start in a terminal")
                error.__cause__ = caught
            # The run may have ended while this thread waited for the keyboard, or end right now: to ask first is no help.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver, line, error)

        threading.Thread(target=read, name="human-player", daemon=True).start()
        return await result

    def _print(self, text: str, end: str) -> None:
        print(text, end=end, file=self._writer, flush=True)


def _readline() -> str:
    try:
        # As `readline` gives it: an empty line has its end, the end of the input is "".
        return input() + "\n"
    except EOFError:
        return ""


def render(request: Request, show: int) -> str:
    """The last `show` messages of the request and its legal actions, as a human reads them."""
    head = f"── {request.tag or 'environment'} " + "─" * 40
    blocks = [f"[{message['role']}]\n{text_of(message['content'])}" for message in (request.messages or ())[-show:]]
    hint = f"actions: {', '.join(request.actions)} · q leaves" if request.actions else "q leaves"
    return "\n".join(["", head, *blocks, f"({hint})"])


def text_of(content: str | list[Mapping[str, Any]]) -> str:
    """The text of a message; an image stands as its size."""
    if isinstance(content, str):
        return content
    return "".join(
        part["text"] if part["type"] == "text" else f"[image {'×'.join(map(str, part['image'].shape[:2]))}]"
        for part in content
    )
