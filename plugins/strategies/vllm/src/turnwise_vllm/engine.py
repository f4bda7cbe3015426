"""The engine of this process: vLLM's `AsyncLLM` on an event loop and a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError, EngineError, EngineLost, TurnwiseError, listed
from turnwise_serving.models import facts
from turnwise_vllm import adapters
from turnwise_vllm.arguments import applied, cpu_build, engine_arguments, environment, head_size
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.images import Picture, engine_input
from turnwise_vllm.memory import KEYS, MEMORY, chain
from turnwise_vllm.requests import Answer

T = TypeVar("T")
# Seconds in which vLLM's processes end by themselves.
_SHUTDOWN = 20.0
START = "the start"
_CALL_FAILED = " method failed: "
"""Stands in vLLM's errors between the name of a call to its workers and what they said."""


class Engine(Protocol):
    """What the backend needs of a vLLM, wherever it runs. Once started, every method raises EngineLost when the engine
    has ended."""

    async def start(self) -> None:
        """Start it, or find it."""
        ...

    async def generate(
        self, ids: list[int], sampling: dict[str, Any], name: str, pictures: list[Picture], copy: int | None
    ) -> Answer:
        """Sample one response with the data parallel copy of that number (None: there is one); cancelling aborts it."""
        ...

    async def control(self, step: str, **arguments: Any) -> Any:
        """One of pause, resume, start_update, update, finish_update, begin_adapters, load_adapters, reset_cache,
        version, set_version, sleep, wake."""
        ...

    async def close(self) -> None:
        """Stop what was started."""
        ...


class LocalEngine:
    """An `AsyncLLM`. Its start and its work between tokens block neither the caller's loop nor each other."""

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        self._config, self._context = config, context
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._llm: Any = None
        self._adapters = ""  # the folder of those that requests ask for

    async def start(self) -> None:
        """Raises ConfigError or EngineError (vLLM refuses, or is not up within `start_timeout`)."""
        self._thread = threading.Thread(target=self._serve, name="turnwise-vllm", daemon=True)
        self._thread.start()
        # vLLM gives up at start_timeout by itself, and says more; this one is for a start that hangs elsewhere.
        self._llm = await self._run(self._build(), self._config.start_timeout + 60, START)

    async def generate(
        self, ids: list[int], sampling: dict[str, Any], name: str, pictures: list[Picture], copy: int | None
    ) -> Answer:
        """Raises EngineError."""
        return await self._run(self._generate(ids, sampling, name, pictures, copy), None, "sampling")

    async def control(self, step: str, **arguments: Any) -> Any:
        """Raises EngineError."""
        return await self._run(self._control(step, arguments), self._context.weight_sync_timeout, MEMORY.phase(step))

    async def close(self) -> None:
        """End the engine, its processes and the thread."""
        llm, self._llm = self._llm, None
        if self._thread is None:
            return
        if llm is not None:
            await self._run(_silence(llm), _SHUTDOWN, "the end")
            # Not on the caller's loop, which must not wait for the end of vLLM's processes.
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN)
            # Its __del__ would do it again, when the interpreter is half gone.
            llm.shutdown = _nothing
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, _SHUTDOWN)
        self._thread = None

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # After `stop`: what still runs on the loop is cancelled here, or Python would complain of it at the end.
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _run(self, work: Coroutine[Any, Any, T], timeout: float | None, when: str) -> T:
        """Run `work` on the engine's loop; whatever it raises becomes one EngineError. `when`: the phase that the error
        names. No `timeout`: who waits gives up."""
        try:
            return await asyncio.wait_for(
                asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop)), timeout
            )
        except TurnwiseError:
            raise
        # vLLM raises its own errors, those of its libraries and those of its workers.
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout is not None:
                key = "start_timeout" if when == START else "weight_sync_timeout"
                raise EngineError(
                    f"vLLM did not answer within {timeout:g} s, in {when} of actor_infer. Fix: raise {key}"
                ) from error
            # vLLM says so when its engine process is gone; without it the request alone has failed.
            if self._llm is not None and self._llm.errored:
                raise EngineLost(_died(error, when)) from error
            raise EngineError(MEMORY.explained(_failed(error), chain(error), when)) from error

    async def _build(self) -> Any:
        config, context, cpu = self._config, self._context, cpu_build()
        with applied(environment(config, cpu)):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if cpu:
                check_head_size(Path(str(context.model)))
            arguments = engine_arguments(config, context, cpu)
            if context.devices and not cpu:
                arguments["device_ids"] = list(context.devices)
            try:
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            # Whatever vLLM refuses, in whatever of its libraries' errors.
            except Exception as error:
                reported = MEMORY.explained(f"vLLM did not start: {_words(error)}", chain(error), START)
                elsewhere = (
                    f"; where they name memory, lower {KEYS} of actor_infer"
                    if "initialization failed" in reported
                    else ""
                )
                raise EngineError(f"{reported}. Its own messages above may say more{elsewhere}") from error
        # vLLM's own label for its first weights is no number; ours count from 0.
        await llm.update_weight_version("0")
        if cpu and config.pipeline_parallel_size > 1:
            await llm.collective_rpc("prepare_pipeline")
        return llm

    async def _generate(
        self, ids: list[int], sampling: dict[str, Any], name: str, pictures: list[Picture], copy: int | None
    ) -> Answer:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # Only the whole response is wanted: vLLM sends an answer for each token otherwise.
        chosen = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        lora = LoRARequest(adapters.NAME, adapters.NUMBER, self._adapters) if self._adapters else None
        final = None
        async for output in self._llm.generate(
            engine_input(ids, pictures), chosen, name, lora_request=lora, data_parallel_rank=copy
        ):
            final = output
        if final is None:
            raise EngineError("vLLM ended a request without an answer")
        done = final.outputs[0]
        tokens = list(done.token_ids)
        logprobs = [step[token].logprob for step, token in zip(done.logprobs or (), tokens, strict=True)]
        spans = [(span.version, span.start, span.end) for span in done.weight_versions or ()]
        return Answer(tokens, logprobs, spans, str(done.finish_reason))

    async def _control(self, step: str, arguments: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        llm = self._llm
        match step:
            case "pause":
                # keep: responses in progress go on after the update, their cache computed again by reset_cache.
                return await llm.pause_generation(mode="keep", clear_cache=False)
            case "resume":
                return await llm.resume_generation()
            case "start_update":
                await llm.init_weight_transfer_engine(WeightTransferInitRequest())
                return await llm.start_weight_update()
            case "update":
                return await llm.update_weights(WeightTransferUpdateRequest(update_info=arguments["info"]))
            case "finish_update":
                return await llm.finish_weight_update(arguments["version"])
            case "begin_adapters":
                self._adapters = adapters.ZEROS
                # Rank 1 is enough for zeros; the first update puts adapters of the run's rank in their place.
                return await llm.collective_rpc("begin_adapters", args=(1,))
            case "load_adapters":
                self._adapters = arguments["folder"]
                return await llm.collective_rpc("load_adapters", args=(self._adapters,))
            case "set_version":
                return await llm.update_weight_version(arguments["new_version"])
            case "reset_cache":
                # The features of images were computed with the old weights, too.
                await llm.reset_encoder_cache()
                # Without this, cached prompts would mix old weights with new ones, in silence.
                return await llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            case "version":
                return await llm.get_weight_version()
            case "sleep":
                # Level 1 keeps a copy of the weights in the host's memory.
                return await llm.sleep(level=1, mode="keep")
            case "wake":
                return await llm.wake_up([arguments["tag"]])
        raise ValueError(step)


def _nothing(timeout: float | None = None) -> None:
    """What is left to do for an engine that was shut down."""


async def _silence(llm: Any) -> None:
    """Stop reading the engine's answers: its end is no failure to report."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()


def check_head_size(folder: Path) -> None:
    """Raises ConfigError for a model whose attention heads vLLM has no CPU kernel for; its own message would come from
    another process."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known, size = CPUAttentionBackend.get_supported_head_sizes(), head_size(facts(folder))
    if size not in known:
        raise ConfigError(
            f"vLLM on a CPU has no attention for heads of {size} numbers. Known: {listed(map(str, known))}. "
            "Fix: another hidden_size or num_heads (hidden_size ÷ num_heads), or another backend"
        )


def _died(error: Exception, when: str) -> str:
    """The end of the engine, whose own words may have gone to the terminal alone."""
    reported = MEMORY.explained("vLLM's engine died", chain(error), when)
    if reported != "vLLM's engine died":
        return reported
    return (
        f"{reported}, in {when} of actor_infer. Its own messages above say why. Fix: after an out-of-memory lower"
        f" {KEYS}"
    )


def _failed(error: Exception) -> str:
    cause = error.__cause__ if error.__cause__ is not None and not str(error) else error
    _, found, reason = _words(cause).partition(_CALL_FAILED)
    return f"vLLM failed: {reason if found else f'{type(cause).__name__}: {_words(cause)}'}"


def _words(error: BaseException) -> str:
    """An error's words on one line: vLLM's validation errors have the reason on their second."""
    return " ".join(str(error).split())[:400] or type(error).__name__
