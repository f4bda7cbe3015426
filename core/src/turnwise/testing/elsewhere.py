"""Episodes of the environments under test in a second process, in which `hash()` of a text is another number and the
clocks can be put forward."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.plugins import DISABLE, registry

TIMEOUT = 300.0
"""Seconds for all environments under test together."""
CODE = """
import sys
from turnwise.testing.later import Clocks
clocks = Clocks()
clocks.install()  # before any environment is imported
from turnwise.testing.contracts.environment import report
report(sys.argv[1], clocks)
"""


def played_elsewhere(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name → way → what `ways[way](name)` of `report_to` returned in a new process, or the text of what it raised.

    The process has this one's plugins and search path, and another PYTHONHASHSEED. Raises RuntimeError where it ends
    early, subprocess.TimeoutExpired."""
    known = registry()
    environment = {
        **os.environ,
        # Another than this process's: 0 makes `hash` of text fixed, any other number makes it a different one.
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        DISABLE: ",".join(known.blocked),
    }
    with tempfile.TemporaryDirectory(prefix="turnwise-kit-") as folder:
        order = Path(folder) / "order.json"
        order.write_text(json.dumps({"plugins": known.declared, "names": list(names)}), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(order)],
            env=environment,
            # An environment that asks the keyboard must fail, and not hang.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        answer = order.with_suffix(".pickle")
        if done.returncode or not answer.exists():
            raise RuntimeError(f"the second process ended with {done.returncode}: {done.stderr[-500:]}")
        pickled: dict[str, dict[str, Any]] = pickle.loads(answer.read_bytes())
    return {name: {way: _loaded(value) for way, value in ways.items()} for name, ways in pickled.items()}


def report_to(path: str, ways: Mapping[str, Callable[[str], Any]]) -> None:
    """The second process's side: answer the order in the file `path`, every name in the first way, then in the next."""
    order = json.loads(Path(path).read_text(encoding="utf-8"))
    registry().declare(order["plugins"])
    answers: dict[str, dict[str, bytes | str]] = {name: {} for name in order["names"]}
    for way, played in ways.items():
        for name, answer in answers.items():
            answer[way] = _answer(played, name)
    Path(path).with_suffix(".pickle").write_bytes(pickle.dumps(answers))


def _answer(played: Callable[[str], Any], name: str) -> bytes | str:
    try:
        # Each by itself: an answer that cannot be pickled is told for its own environment alone.
        return pickle.dumps(played(name))
    except BaseException as error:  # one that fails, or is skipped, leaves the others their answers
        return f"{type(error).__name__}: {error}"


def _loaded(answer: bytes | str) -> Any:
    return pickle.loads(answer) if isinstance(answer, bytes) else answer
