"""What tests of served engines share: a tiny model with its chat, and a server that is waited for. Needs
turnwise-hf."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx2

from turnwise.contracts.chat import Chat, ModelSourceContext
from turnwise_serving.process import ServerProcess

if TYPE_CHECKING:
    from turnwise_hf.source import HfModelSource

S = TypeVar("S", bound=ServerProcess)
# Tokens of a conversation in tests.
LENGTH = 512
_TEXTS = (
    "The goal is 2 down 1 right. Holes: Left Down.",
    "Which way?",
    "Left",
    "Down",
    "Right",
    "Up",
    "one two three a b",
)
_START = 300.0


@functools.cache
def model(seed: int = 0) -> Path:
    """A tiny random Qwen2 with a word tokenizer, and heads that the engines' CPU attention knows.

    Its weights are larger than by default, so that a log-prob of another temperature or token is far off, and small
    enough that fp32 rounds log-probs by 1e-5 at most: twice as large, by 1e-4.
    """
    place = Path(tempfile.mkdtemp(prefix="turnwise-served-model-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    recipe = {
        "hidden_size": 64,
        "num_heads": 2,
        "initializer_range": 0.15,
        "max_position_embeddings": LENGTH,
        "seed": seed,
    }
    return _source(place).prepare({"recipe": recipe})


@functools.cache
def chat() -> Chat:
    """The chat of `model`, whatever its seed."""
    return _source(model().parent).chat(model())


def _source(place: Path) -> HfModelSource:
    from turnwise_hf.source import HfModelSource

    return HfModelSource(
        None, ModelSourceContext(cache=place, texts=lambda: [{"role": "user", "content": text} for text in _TEXTS])
    )


def started(server: S) -> S:
    """The server, when it answers; it ends with this process. Raises RuntimeError: it does not."""
    deadline = time.monotonic() + _START
    while True:
        try:
            # trust_env: a proxy of the environment does not reach the loopback interface.
            if httpx2.get(f"{server.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return server
        except httpx2.HTTPError:
            pass
        if not server.alive or time.monotonic() > deadline:
            raise RuntimeError(f"{server.engine} did not start: {server.tail()}")
        time.sleep(0.2)
