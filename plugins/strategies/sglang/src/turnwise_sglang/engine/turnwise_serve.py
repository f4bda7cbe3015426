"""Run by the interpreter that has SGLang: serves, or looks through, the server arguments of one JSON file. It imports
nothing of Turnwise.

`turnwise_serve.py check arguments.json` prints {"unknown": [...], "wrong": [...], "known": [...]}. `turnwise_serve.py
serve arguments.json`
serves until its standard input ends: the process that started it holds the other end, so no server outlives it. What
SGLang leaves behind when it is killed is named after the folder of arguments.json, or lies in its subfolder `tmp`, for
whoever cleans up. SGLang's own processes are spawned and import this file again, which brings the CPU's preparations
into each of them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before what stands there is imported.
sys.path.append(os.environ["TURNWISE_SERVING_ENGINE"])

import turnwise_child  # type: ignore[import-not-found]
import turnwise_cpu  # type: ignore[import-not-found]

LONGEST = 80
"""Characters of a folder in which a unix socket still has room for its name."""

if turnwise_cpu.ON:
    turnwise_cpu.prepare()


def check(arguments: dict[str, Any]) -> dict[str, list[str]]:
    """What SGLang's own argument class has against the arguments: unknown names, and values of a wrong type or outside
    the choices."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    fields = {field.name: field for field in msgspec.structs.fields(ServerArgs)}
    wrong = []
    for name, value in arguments.items():
        if name not in fields:
            continue
        try:
            msgspec.convert(value, fields[name].type)
        except (msgspec.ValidationError, TypeError) as error:
            wrong.append(f"{name}: {value!r}: {error}")
            continue
        choices = next(
            (c for extra in getattr(fields[name].type, "__metadata__", ()) if (c := getattr(extra, "choices", None))),
            None,
        )
        if isinstance(choices, list | tuple | set) and value is not None and value not in choices:
            wrong.append(f"{name}: {value!r} is none of {', '.join(map(str, choices))}")
    return {
        "unknown": [name for name in arguments if name not in fields],
        "wrong": wrong,
        "known": [n for n in fields if not n.startswith("_")],
    }


def serve(arguments: dict[str, Any], folder: Path) -> None:
    """SGLang's HTTP server, until it is stopped or the starter's end of standard input closes."""
    turnwise_child.end_with_the_starter(lambda: _forget_loads(folder))
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if turnwise_cpu.ON:
        turnwise_cpu.allow_seeds()
    _let_adapters_go()
    _leave_traces_in(folder)
    try:
        run_server(ServerArgs(**arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _let_adapters_go() -> None:
    """A request that is aborted while it waits in SGLang's queue lets go of its adapter, as all others do: unloading
    would wait for it for ever."""
    import asyncio

    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    handle = TokenizerManager._handle_abort_req

    def handled(self: Any, aborted: Any) -> None:
        state = self.rid_to_state.get(aborted.rid)
        handle(self, aborted)
        held = getattr(state and state.obj, "lora_id", None)
        # After these two SGLang does so itself.
        if (
            held is not None
            and aborted.rid not in self.rid_to_state
            and (aborted.finished_reason or {}).get("status_code") not in (500, 503)
        ):
            task = asyncio.ensure_future(self.lora_registry.release(held))
            releasing.add(task)
            task.add_done_callback(releasing.discard)

    releasing: set[asyncio.Future[None]] = set()
    TokenizerManager._handle_abort_req = handled


def _leave_traces_in(folder: Path) -> None:
    """The sockets of this process's making come to lie in the folder.

    The file in /dev/shm, by which the processes report their load, has its name.
    """
    from sglang.srt.server_args import PortArgs

    if len(str(folder)) < LONGEST:
        tempfile.tempdir = str(folder / "tmp")
    made = PortArgs.init_new

    def init_new(*args: Any, **kwargs: Any) -> Any:
        ports = made(*args, **kwargs)
        ports.instance_id = folder.name
        return ports

    PortArgs.init_new = staticmethod(init_new)


def _forget_loads(folder: Path) -> None:
    for path in Path("/dev/shm").glob(f"sglang_loads_{folder.name}_*"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    if sys.argv[1] == "check":
        print(json.dumps(check(given)))
    else:
        serve(given, Path(sys.argv[2]).parent)
# In a process that SGLang spawned, where tokens are sampled.
elif turnwise_cpu.ON:
    turnwise_cpu.allow_seeds()
