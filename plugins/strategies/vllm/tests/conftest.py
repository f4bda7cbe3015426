"""The real engine in this process, started once; models whose weights it is given; and a sender for them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Offer

# vllm_cases: the suite runs in importlib mode, where folders of tests are on no path.
sys.path.append(str(Path(__file__).parent))


async def send(
    backend: Any, named: Any, version: int, size: int = 20_000, sender: Any = None, adapter: Any = None
) -> int:
    """Stream named tensors to a backend, by shared memory or what `sender` sends by; the sending thread ends with
    it."""
    from turnwise_torch.stream import Sender, buckets

    if backend.engine is None:  # its start may take longer than an offer waits on a busy machine
        await backend.pause()
        await backend.resume()
    transport = "shared_memory" if sender is None else "process_group"
    sender = sender or Sender(backend.receivers("shared_memory"), 120)

    def work() -> None:
        with contextlib.suppress(Exception):  # the receiver reports what went wrong
            sender.send(buckets(named, size))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return await backend.receive(Offer(transport, version, sender.payload, adapter))
    finally:
        sender.close()
        thread.join(30)


class Lab:
    """One in-process backend on one event loop, and what the tests do with it."""

    def __init__(self, options: dict[str, Any] | None = None, **changes: Any) -> None:
        from turnwise_vllm.backend import VllmBackend
        from turnwise_vllm.config import VllmConfig
        from turnwise_vllm.fixtures import model_context

        self.runner = asyncio.Runner()
        self.context = evolve(model_context(), **changes)
        # Nothing is read from disk: whatever is right below came by a weight update.
        self.backend = VllmBackend(
            VllmConfig(**{"load_format": "dummy", "block_size": 32, **(options or {})}), self.context
        )
        self.version = 0

    def close(self) -> None:
        """Stop the engine."""
        self.runner.run(self.backend.close())
        self.runner.close()
        # vLLM leaves sockets that complain when they are collected: here, where the tests' filters hear them
        gc.collect()

    def model(self, seed: int) -> Any:
        """A random model of the folder's shape: biases and norms too, which a fresh one has all alike."""
        import torch

        from turnwise_torch.models import load_causal_lm

        model = load_causal_lm(self.context.model, "fp32", "eager")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return model

    async def send(self, named: Any, size: int = 20_000, sender: Any = None, adapter: Any = None) -> int:
        """Stream named tensors as the next version, by shared memory or what `sender` sends by; its thread ends with
        it."""

        self.version += 1
        return await send(self.backend, named, self.version, size, sender, adapter)

    def serve(self, model: Any) -> int:
        """Send all of a model's weights."""
        return self.runner.run(self.send(model.state_dict().items()))

    def request(self, seed: int = 0, tokens: int = 8, length: int = 9, prompt: int = 0, **args: Any) -> Request:
        """A random prompt (`prompt` chooses it) of `length` ids."""
        ids = np.random.default_rng(prompt).integers(3, 20, length).astype(np.int32)
        return Request(seed, GeneratingArgs(tokens, **args), tokens, (0, 0, seed, 0, 0), ids=ids)

    def ask(self, *requests: Request) -> list[Any]:
        """All of them at once."""

        async def scene() -> list[Any]:
            return await asyncio.gather(*[self.backend.generate(request) for request in requests])

        return self.runner.run(scene())

    def off(self, model: Any, request: Request, answer: Any, chosen: slice | np.ndarray = slice(None)) -> float:
        """How far the answer's log-probs are from those of `model`, at most, over the `chosen` tokens."""
        from turnwise_torch.fixtures import log_probs

        expected = log_probs(model, np.concatenate([request.ids, answer.ids]), request.args.temperature)[
            -len(answer.ids) :
        ]
        return float(np.abs(answer.logprobs - expected)[chosen].max())


@pytest.fixture(scope="session")
def make_lab() -> Callable[..., Lab]:
    """`make_lab(options, **changes of the context)`: an engine of one's own, to be closed."""
    if importlib.util.find_spec("vllm") is None:
        from vllm_cases import MISSING

        pytest.skip(MISSING)
    return Lab


@pytest.fixture(scope="session")
def lab(make_lab: Callable[..., Lab]) -> Iterator[Lab]:
    """The engine in this process."""
    lab = make_lab()
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def models(lab: Lab) -> Callable[[int], Any]:
    """`models(seed)`: a random model, made once."""
    made: dict[int, Any] = {}
    return lambda seed: made.setdefault(seed, None) or made.update({seed: lab.model(seed)}) or made[seed]


@pytest.fixture(scope="session")
def stream() -> Callable[..., Any]:
    """`stream(backend, named, version)`: a coroutine that sends weights by shared memory."""
    return send


@pytest.fixture(scope="module")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's cache is a new folder, as on a machine that never ran it: there it inspects a model's class, which else it
    remembers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm_cache")))
        yield


@pytest.fixture(scope="session")
def vision_options() -> dict[str, Any]:
    """Options with which vLLM sees images here: in this process where torchvision fits torch, else in a server that
    finds it elsewhere."""
    if importlib.util.find_spec("vllm") is None:
        from vllm_cases import MISSING

        pytest.skip(MISSING)
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    folder = Path(sys.prefix) / "share" / "torchvision"
    if not folder.is_dir():
        pytest.skip(f"torchvision is not installed (pip install --no-deps --target {folder} torchvision)")
    return {"mode": "server", "python_path": (str(folder),)}


@pytest.fixture(scope="session")
def adapted() -> Callable[..., Any]:
    """`adapted(folder, seed, place)`: PEFT's model over the one in `folder` with random adapters, their tensors by the
    names of PEFT's files, and their configuration; saved by PEFT in `place`."""

    def make(folder: Path, seed: int, place: Path | None = None) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        import torch
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

        from turnwise_torch.models import load_causal_lm

        target = [
            "q_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "down_proj",
        ]  # fused layers of which not all parts have adapters
        model = get_peft_model(
            load_causal_lm(folder, "fp32", "eager"), LoraConfig(r=4, lora_alpha=6, target_modules=target)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        if place is not None:
            model.save_pretrained(str(place))
        config = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=sorted))
        return model, get_peft_model_state_dict(model), config

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a model with two layers and two key-value heads of 32."""
    facts = {
        "vocab_size": 100,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return tmp_path


@pytest.fixture
def engine_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A vLLM of four arguments."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    text = """
class EngineArgs:
    model: str = ""
    max_num_seqs: int = 1
    swap_space: int = 0


class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_loader("vllm", None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(tmp_path / "vllm")]
    from turnwise_vllm import arguments

    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: spec if name == "vllm" else None)
    monkeypatch.setattr(arguments, "cpu_build", lambda: False)
