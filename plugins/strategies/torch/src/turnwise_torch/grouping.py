"""A process group that forms and ends within a time, whatever the other side does."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise_torch.stream import Lines

T = TypeVar("T")
# Seconds between two looks at whether a partner hung up while a collective waits.
_LOOK = 0.05


def bound(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def meeting(facts: Mapping[str, Any], timeout: float) -> Any:
    return dist.TCPStore(
        facts["host"], facts["port"], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def group_of(facts: Mapping[str, Any], store: Any, address: str, timeout: float) -> Any:
    """The group as one of its ranks, from `address`. Its prefixes in the store are those of
    torch.distributed.new_group-like helpers, which engines use that join by host, port and name
    (torch.distributed.distributed_c10d._new_process_group_helper)."""
    kind = "cpu" if facts["backend"] == "gloo" else "cuda"
    place = dist.PrefixStore(f"{kind}/", dist.PrefixStore(f"{facts['name']}/", dist.PrefixStore(facts["name"], store)))
    if facts["backend"] == "gloo":
        # Private in torch, and the only way to bind gloo to the address by which the partners know this process.
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(place, facts["rank"], facts["size"], options)
    options = dist.ProcessGroupNCCL.Options()
    # Later than our own limit: torch's watchdog would end the process.
    options._timeout = timedelta(seconds=2 * timeout + 60)
    return dist.ProcessGroupNCCL(place, facts["rank"], facts["size"], options)


def broadcast_within(
    group: Any, tensors: Sequence[Tensor], device: torch.device, lines: Sequence[Lines], timeout: float
) -> None:
    """From rank 0 to all, to the end."""
    # Device and stream are a thread's own: what was computed here has to be complete before another thread sends.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

    def work() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for pending in [group.broadcast([tensor], options) for tensor in tensors]:
            pending.wait()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    watched(work, lines, timeout)


def watched(work: Callable[[], T], lines: Sequence[Lines], timeout: float) -> T:
    """`work` in a thread: its partners may never come, and what it waits in cannot be interrupted. Raises TimeoutError;
    EOFError as soon as a partner hangs up; what `work` raises. After the first two the thread ends with its group."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # daemon: a collective that never returns must not keep the process from ending.
    threading.Thread(target=run, name="turnwise-broadcast", daemon=True).start()
    end = time.monotonic() + timeout
    while not concurrent.futures.wait([done], _LOOK).done:
        if any(line.gone for line in lines):
            raise EOFError("it hung up")
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {timeout:g} s")
    return done.result()


def abort(group: Any) -> None:
    """Leave without waiting for the others, who may be gone."""
    if group is not None:
        group.abort()
