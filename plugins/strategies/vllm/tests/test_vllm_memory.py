"""Memory that does not do: what vLLM says of it becomes one line with the phase, the role and the keys to lower. No
engine runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import EngineError, EngineLost
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.engine import LocalEngine
from turnwise_vllm.memory import MEMORY
from turnwise_vllm.process import Server
from turnwise_vllm.server import ServedEngine

CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB"
BLOCKS = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing"
    " the engine."
)
TOO_LONG = (
    "ValueError: To serve at least one request (9.0 GiB KV cache is needed, which is larger than the available KV cache"
    " memory (1.0 GiB)."
)
KV = (
    "ValueError: Available memory on node 0 (8.1/21.21 GiB) on kv cache allocation is less than requested memory for kv"
    " (37252.9 GiB)."
)
FREE = (
    "ValueError: Free memory on device cuda:0 (9/80 GiB) on startup is less than desired GPU memory utilization (0.9,"
    " 72 GiB)."
)
ALL = "Fix: lower gpu_memory_utilization, max_num_seqs, max_num_batched_tokens or max_model_len"
CACHE = "Fix: lower max_model_len, max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization"


@pytest.mark.parametrize(
    ("said", "when", "begins", "fix"),
    [
        (CUDA, "the start", "out of memory, in the start of actor_infer: it died", ALL),
        (CUDA, "sampling", "out of memory, in sampling of actor_infer: it died", ALL),
        (
            KV,
            "the start",
            "out of memory, in the start of actor_infer: it died",
            "Fix: lower kv_cache_memory_bytes or max_num_seqs",
        ),
        (FREE, "the start", "out of memory, in the start of actor_infer: it died", ALL),
        (
            CUDA,
            "the weight update",
            "out of memory, in the weight update of actor_infer",
            "lower gpu_memory_utilization or model_update_buffer",
        ),
        (
            CUDA,
            "the wake-up",
            "out of memory, in the wake-up of actor_infer",
            "lower gpu_memory_utilization, or give it devices of its own",
        ),
        (BLOCKS, "the start", "no memory left for the cache, in the start of actor_infer: it died", CACHE),
        (TOO_LONG, "the start", "no memory left for the cache, in the start of actor_infer: it died", CACHE),
    ],
)
def test_words_about_memory_become_one_line(said: str, when: str, begins: str, fix: str) -> None:
    message = MEMORY.explained("it died.", f"Traceback\n{said}\nRuntimeError: cancelled", when)
    assert message.startswith(begins) and fix in message and "\n" not in message


def test_other_words_change_nothing() -> None:
    assert (
        MEMORY.explained("it died", "RuntimeError: an illegal memory access was encountered", "sampling") == "it died"
    )


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, "sampling") for name in ("/inference/v1/generate", "/pause", "resume")),
        *(
            (name, "the weight update")
            for name in ("/update_weights", "/collective_rpc", "finish_update", "load_adapters")
        ),
        *((name, "the wake-up") for name in ("wake", "/wake_up")),
    ],
)
def test_routes_and_steps_belong_to_a_phase(name: str, when: str) -> None:
    assert MEMORY.phase(name) == when


def server_of(log: Path) -> Server:
    """As after the start of a server that wrote `log`."""
    server = Server.__new__(Server)
    server.log = log
    return server


def served(server: Server | None) -> ServedEngine:
    """An engine in that server (None: in one that is attached to). Its private members stand for an engine that died:
    no engine dies for lack of memory when a test asks it to."""
    engine = ServedEngine(VllmConfig(mode="attach", base_url="http://h:1"), InferenceContext(None, None))
    engine._process = server
    return engine


def test_a_servers_log_reports_why_its_engine_died(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        f"INFO up\n{CUDA}\nraise RuntimeError(\nRuntimeError: Engine core initialization failed. See root cause"
        " above.\n",
        encoding="utf-8",
    )
    server = server_of(log)
    message = served(server)._gone(
        "the vLLM server answered /update_weights with 500. Its engine died", "/update_weights"
    )
    assert isinstance(message, EngineLost)
    assert str(message).startswith("out of memory, in the weight update of actor_infer: the vLLM server answered")
    assert server.tail() == CUDA
    assert str(served(None)._gone("it is gone", "/pause")) == "it is gone"


def test_the_reason_of_an_error_that_stands_on_its_second_line_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Traceback (most recent call last):\npydantic_core._pydantic_core.ValidationError: 1 validation error for"
        " ModelConfig\n  Value error, Model architectures ['X'] failed to be inspected. [type=value_error]\n    For"
        " further information visit …\n",
        encoding="utf-8",
    )
    message = server_of(log).tail()
    assert message.endswith(
        "1 validation error for ModelConfig Value error, Model architectures ['X'] failed to be inspected."
        " [type=value_error]"
    )


class Dead:
    """An engine of this process that has ended."""

    errored = True


@pytest.mark.parametrize("errored", [True, False])
@pytest.mark.parametrize("cause", [None, RuntimeError(CUDA)])
def test_an_engine_of_this_process_reports_what_it_knows(errored: bool, cause: Exception | None) -> None:
    async def failing() -> None:
        raise ValueError("it failed") from cause

    async def scene() -> EngineError:
        engine = LocalEngine(VllmConfig(), InferenceContext(None, None))
        # As above: in place of vLLM's own, which does not fail when it is asked to.
        engine._loop.close()
        engine._loop = asyncio.get_running_loop()
        engine._llm = Dead() if errored else None
        with pytest.raises(EngineLost if errored else EngineError) as message:
            await engine._run(failing(), 5, "sampling")
        return message.value

    message = str(asyncio.run(scene()))
    what = "vLLM's engine died" if errored else "vLLM failed: ValueError: it failed"
    if cause is not None:
        assert message == f"out of memory, in sampling of actor_infer: {what}. {ALL}"
    elif errored:
        assert message.startswith(
            f"{what}, in sampling of actor_infer. Its own messages above say why. Fix: after an out-of-memory lower"
            " gpu_memory_util"
        )
    else:
        assert message == what
