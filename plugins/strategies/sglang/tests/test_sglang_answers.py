"""Requests and answers without a server: what is sent, how versions and stop strings are read, and SGLang's seed hash
in plain torch."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import turnwise_sglang
from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.data.trajectory import int32
from turnwise.errors import EngineError
from turnwise.testing.fake_model import FakeChat
from turnwise_sglang.answers import Limits, StopStrings, body, continued, ended, generation, joined
from turnwise_sglang.weights import Names, problems, shapes

LIMITS = Limits(sequence_length=10, vocabulary=100)


def ask(seed: int = 0, ids: Sequence[int] = (1, 2, 3), limit: int = 4, **args: Any) -> Request:
    return Request(seed, GeneratingArgs(**args), limit, ids=int32(ids), tag="Lake")


def answer(
    ids: Sequence[int], spans: Sequence[tuple[str, int, int]] = (("3", 0, 99),), finish: str = "length", **changes: Any
) -> dict[str, Any]:
    pairs = [[-0.5 * number, number, None] for number in ids]
    payload = [{"version": version, "start": start, "end": min(end, len(ids))} for version, start, end in spans]
    meta = {"finish_reason": {"type": finish}, "output_token_logprobs": pairs, "weight_versions": payload}
    return {"output_ids": list(ids), "meta_info": {**meta, **changes}}


def test_a_request_asks_for_what_the_role_and_the_request_say() -> None:
    payload = body(ask(2**63 + 1, temperature=0.7, top_p=0.9), LIMITS, (5, 6))
    assert payload["input_ids"] == [1, 2, 3]
    assert payload["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "stop_token_ids": [5, 6],
        "sampling_seed": -(2**63) + 1,
    }
    assert (payload["return_logprob"], payload["stream"]) == (True, False)
    assert body(ask(ids=[1] * 8, limit=50), LIMITS, ())["sampling_params"]["max_new_tokens"] == 2
    assert body(ask(stop_strings=("x",), top_k=3), LIMITS, ())["stream"] is True


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(ids=()), r"takes token ids, and the request has none \(request of Lake\)"),
        (ask(ids=[1] * 10), "leaves no room for a response within sequence_length 10"),
        (ask(ids=[100]), "token id 100 is outside the model's vocabulary of 100"),
        (ask(limit=0), "cannot sample 0 tokens"),
        (ask(top_p=0.0), "outside the allowed ranges"),
        (
            Request(0, GeneratingArgs(), 4, ids=int32([1]), images=(np.zeros((2, 2, 3), np.uint8),)),
            "model takes text only",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(request_: Request, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        body(request_, LIMITS, ())


def test_spans_of_versions_become_one_version_a_token() -> None:
    spans = [("default", 0, 1), ("7", 1, 3), ("8", 3, 4)]
    made = generation(answer(b"bcde", spans), ask(), FakeChat(), ours=True)
    assert made.versions is not None and made.versions.tolist() == [0, 7, 7, 8]
    assert made.logprobs is not None and made.logprobs.tolist() == [-0.5 * number for number in b"bcde"]
    assert (made.text, made.finish) == ("bcde", "length")
    assert generation(answer([1]), ask(), FakeChat(), ours=False).logprobs is None
    for broken, words in (
        (
            answer([1, 2], [("7", 0, 1)]),
            "SGLang reported the weight version of 1 of 2 tokens. Fix: SGLang 0.5.21 or newer",
        ),
        (answer([]), "0 log-probs for 0 tokens"),
        ({**answer([1, 2]), "output_ids": [1]}, "2 log-probs for 1 tokens"),
        (answer([1], output_token_logprobs=[[None, 1, None]]), "no numbers"),
    ):
        with pytest.raises(EngineError, match=words):
            generation(broken, ask(), FakeChat(), ours=True)


def test_a_stop_string_ends_at_the_token_that_completes_it_however_the_ids_arrive() -> None:
    for pieces in ([1, 2, 3, 4, 5], [2, 5], [5]):
        stops = StopStrings(ask(stop_strings=("zz", "cd")), FakeChat())
        found = [stops.length(list(b"bcdef")[:end]) for end in pieces]
        assert next(length for length in found if length is not None) == 3
    for include, text in ((True, "bcd"), (False, "b")):
        made = generation(
            answer(b"bcde"),
            ask(stop_strings=("cd",), include_stop_str_in_output=include),
            FakeChat(),
            True,
            length=3,
        )
        assert (made.text, made.finish) == (text, "stop")
        assert made.ids is not None and made.ids.tolist() == [*b"bcd"]


def test_offered_names_must_be_the_folders() -> None:
    known = {"a": (2, 3), "b": (4,)}
    names = Names(known)
    names.check("a", (2, 3))
    names.check("lm_head.weight", (9, 9))  # tied: the folder holds it under the embedding's name
    with pytest.raises(EngineError, match="offers 'c', which the model's folder does not hold"):
        names.check("c", (1,))
    with pytest.raises(EngineError, match=r"'b' has shape \(5,\), the model's is \(4,\)"):
        names.check("b", (5,))
    with pytest.raises(EngineError, match="1 of the model's tensors were not offered, such as 'b'"):
        names.complete()


def test_weights_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(EngineError, match="cannot read the weights in "):
        shapes(tmp_path)


@pytest.mark.parametrize(
    ("family", "tied", "wrong"), [("qwen3_moe", True, True), ("qwen3_moe", False, False), ("qwen2", True, False)]
)
def test_a_head_that_sglang_would_leave_empty_is_refused(tmp_path: Path, family: str, tied: bool, wrong: bool) -> None:
    assert problems(tmp_path) == []
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": family, "tie_word_embeddings": tied}), encoding="utf-8"
    )
    assert [f"SGLang's {family} does not tie its output head" in str(line) for line in problems(tmp_path)] == [
        True
    ] * wrong


def preparations() -> ModuleType:
    """The CPU's preparations, which SGLang's interpreter imports; nothing of theirs is active here."""
    path = Path(turnwise_sglang.__file__).parent / "engine" / "turnwise_cpu.py"
    spec = importlib.util.spec_from_file_location("turnwise_cpu_here", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for whole blocks, in Python's integers."""
    state, low = 0, 2**32 - 1
    for begin in range(0, len(data), 4):
        block = int.from_bytes(data[begin : begin + 4], "little") * 0xCC9E2D51 & low
        state ^= ((block << 15 | block >> 17) & low) * 0x1B873593 & low
        state = (state << 13 | state >> 19) & low
        state = state * 5 + 0xE6546B64 & low
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & low
    state = (state ^ state >> 13) * 0xC2B2AE35 & low
    return state ^ state >> 16


def test_the_seeds_hash_is_murmur3_of_seed_position_and_column() -> None:
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B  # a published test vector
    seeds, positions, columns = [0, 42, 2**63 - 1, -5], [0, 7, 3000, 1], [0, 1, 150000]
    found = preparations().murmur_hash32(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    expected = [
        [
            murmur3((seed % 2**64).to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little"))
            for c in columns
        ]
        for seed, p in zip(seeds, positions, strict=True)
    ]
    assert found.dtype == torch.uint32
    assert found.to(torch.int64).tolist() == expected


def test_a_kernel_package_that_lacks_the_hash_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines without AMX have stand-ins for the native package installed."""
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    made = preparations()
    for _ in range(2):  # the second time all is there
        # Called where SGLang's own processes start, which have their interpreter to themselves.
        made._define_operators()
    seeds, positions, columns = torch.tensor([5, 6]).to(torch.uint64), torch.tensor([0, 3]), torch.tensor([0, 1, 2])
    found = torch.ops.sgl_kernel.murmur_hash32_cpu.default(seeds, positions, columns)
    assert found.tolist() == made.murmur_hash32(seeds, positions, columns).tolist()
    assert all(hasattr(torch.ops.sgl_kernel, f"{name}_cpu") for name in made.NAMED)
    made._libraries.clear()


def test_an_answer_that_was_broken_off_goes_on_as_one() -> None:
    payload = body(ask(limit=5), LIMITS, (99,))
    assert continued(payload, None) == payload
    waiting = {"output_ids": None, "meta_info": {"finish_reason": {"type": "abort"}}}  # it had not begun
    assert continued(payload, joined(None, waiting)) == payload
    first = joined(joined(None, waiting), answer([4, 5], [("3", 0, 2)], "abort"))
    assert ended(first, payload) == ""
    rest = continued(payload, first)
    assert rest["input_ids"] == [1, 2, 3, 4, 5]
    assert (rest["sampling_params"]["max_new_tokens"], payload["sampling_params"]["max_new_tokens"]) == (3, 5)
    whole = generation(
        joined(first, answer([6, 7, 8], [("3", 0, 1), ("4", 1, 3)])), ask(limit=5), FakeChat(), ours=True
    )
    assert whole.ids.tolist() == [4, 5, 6, 7, 8]
    assert whole.logprobs.tolist() == [-2.0, -2.5, -3.0, -3.5, -4.0]
    assert whole.versions.tolist() == [3, 3, 3, 4, 4]
    assert ended(joined(None, answer([4, 99])), payload) == "stop"
    assert ended(joined(None, answer([4, 5, 6, 7, 8])), payload) == "length"


def test_images_that_the_server_divides_otherwise_are_reported() -> None:
    seen = Request(0, GeneratingArgs(), 4, ids=int32([1, 2, 3]), images=(np.zeros((2, 2, 3), np.uint8),))
    assert body(seen, Limits(10, 100, sees=True), ())["input_ids"] == [1, 2, 3]
    assert generation(answer([4], prompt_tokens=3), seen, FakeChat(), ours=True).ids.tolist() == [4]
    with pytest.raises(
        EngineError, match="SGLang saw a prompt of 5 tokens, the request has 3: it divides images otherwise"
    ):
        generation(answer([4], prompt_tokens=5), seen, FakeChat(), ours=True)
