"""Requests that wait for their turn in a batch: how one fails, and where its text ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from attrs import define, field

from turnwise.contracts.inference import Request
from turnwise.errors import EngineError, TurnwiseError
from turnwise_hf.decoding import Row, Sampled


@define(eq=False)
class Waiting:
    """A request, its row, and who waits for it; `drop` takes the row out of the running batch once nobody does."""

    request: Request
    row: Row
    future: asyncio.Future[Sampled]
    drop: Callable[[], None] = field(default=lambda: None)


def fail(waiting: Waiting, error: BaseException) -> None:
    """Give every waiting request an EngineError of its own, with the cause; what is one already keeps its words."""
    if waiting.future.done():
        return
    failure = EngineError(
        str(error) if isinstance(error, TurnwiseError) else f"the hf backend failed: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    waiting.future.set_exception(failure)


def cut(text: str, request: Request) -> str:
    """The text up to its first stop string, with or without it."""
    found = [(place, string) for string in request.args.stop_strings if (place := text.find(string)) >= 0]
    if not found:
        return text
    place, string = min(found)
    return text[: place + len(string)] if request.args.include_stop_str_in_output else text[:place]
