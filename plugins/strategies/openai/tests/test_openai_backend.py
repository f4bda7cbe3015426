"""The player behind an endpoint: what is sent, what is read, and how every failure ends in one line."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image

from turnwise.config.convert import structure
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.errors import EngineError, MachineError
from turnwise_openai.backend import OpenAIBackend
from turnwise_openai.config import OpenAIConfig
from turnwise_openai.fixtures import Answer, Endpoint, said

T = TypeVar("T")
CONTEXT = InferenceContext(None, None)
Serve = Callable[[Answer], Endpoint]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(answer)`: an endpoint that lives as long as the test."""
    endpoints: list[Endpoint] = []

    def start(answer: Answer) -> Endpoint:
        endpoints.append(Endpoint(answer))
        return endpoints[-1]

    yield start
    for endpoint in endpoints:
        endpoint.close()


def ask(content: Any = "Which way?", seed: int = 3, limit: int = 9, **args: Any) -> Request:
    return Request(seed, GeneratingArgs(**args), limit, messages=({"role": "user", "content": content},), tag="Lake")


def with_backend(url: str, work: Callable[[OpenAIBackend], Awaitable[T]], **options: Any) -> T:
    async def main() -> T:
        config = OpenAIConfig(**{"model": "m", "base_url": url, "api_key_env": None, "retry_wait": 0.01, **options})
        backend = OpenAIBackend(config, CONTEXT)
        try:
            return await asyncio.wait_for(work(backend), 30)
        finally:
            await backend.close()
            await backend.close()

    return asyncio.run(main())


def one(url: str, request: Request, **options: Any) -> Any:
    return with_backend(url, lambda backend: backend.generate(request), **options)


def failure(url: str, **options: Any) -> str:
    with pytest.raises(EngineError) as caught:
        one(url, ask(), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_messages_and_generating_arguments_are_sent_and_the_text_comes_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    endpoint = serve(lambda payload: (200, said("Left")))
    request = ask(temperature=0.5, top_p=0.9, top_k=7, stop_strings=("\n",))
    answer = one(endpoint.url, request, api_key_env="A_KEY", extra_body={"user": "me"})
    assert (answer.text, answer.ids, answer.logprobs, answer.versions, answer.finish) == (
        "Left",
        None,
        None,
        None,
        "stop",
    )
    ((path, headers, payload),) = endpoint.seen
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert payload == {
        "model": "m",
        "messages": [{"role": "user", "content": "Which way?"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop": ["\n"],
        "seed": 3,
        "user": "me",
    }


def test_what_is_off_is_not_sent(serve: Serve) -> None:
    endpoint = serve(lambda payload: (200, said("Left", "length")))
    answer = one(endpoint.url, ask(), send_seed=False, max_tokens_key="max_completion_tokens")
    assert answer.finish == "length"
    assert set(endpoint.seen[0][2]) == {"model", "messages", "max_completion_tokens", "temperature"}


def test_an_image_travels_as_a_data_url(serve: Serve) -> None:
    endpoint = serve(lambda payload: (200, said("Up")))
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    one(endpoint.url, ask([{"type": "text", "text": "Look:"}, {"type": "image", "image": image}]))
    text, shown = endpoint.seen[0][2]["messages"][0]["content"]
    assert text == {"type": "text", "text": "Look:"}
    head, _, data = shown["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(base64.b64decode(data)))), image)


def test_ids_and_log_probs_are_taken_where_they_are_ours(serve: Serve) -> None:
    content = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    endpoint = serve(lambda payload: (200, said("ab", token_ids=[4, 9], logprobs={"content": content})))
    answer = one(endpoint.url, ask(temperature=1.0), logprobs="raw")
    assert endpoint.seen[-1][2]["logprobs"] is True
    assert (answer.ids.tolist(), answer.logprobs.tolist(), answer.versions.tolist()) == ([4, 9], [-0.5, -1.5], [0, 0])
    assert one(endpoint.url, ask(temperature=0.7), logprobs="raw").logprobs is None
    assert one(endpoint.url, ask(temperature=0.7), logprobs="scaled").logprobs.tolist() == [-0.5, -1.5]
    assert one(endpoint.url, ask()).logprobs is None
    short = serve(lambda payload: (200, said("ab", token_ids=[4, 9], logprobs={"content": content[:1]})))
    assert one(short.url, ask(), logprobs="scaled").logprobs is None


def test_a_stop_string_that_the_endpoint_names_is_put_back(serve: Serve) -> None:
    endpoint = serve(lambda payload: (200, said("Left", stop_reason="</a>")))
    assert one(endpoint.url, ask(stop_strings=("</a>",))).text == "Left</a>"
    assert one(endpoint.url, ask(stop_strings=("</a>",), include_stop_str_in_output=False)).text == "Left"


def test_what_may_pass_is_tried_again(serve: Serve) -> None:
    states = iter([(429, {"error": {"message": "slow down"}}), (500, b"oops"), (200, said("Down"))])
    endpoint = serve(lambda payload: next(states))
    assert one(endpoint.url, ask()).text == "Down"
    assert len(endpoint.seen) == 3


@pytest.mark.parametrize("wait", ["nan", "-1", "soon", "1e-3"])
def test_whatever_wait_an_endpoint_asks_for_the_request_is_sent_again(serve: Serve, wait: str) -> None:
    answers: Iterator[Any] = iter([(429, {}, {"Retry-After": wait}), (200, said("Down"))])
    endpoint = serve(lambda told: next(answers))
    assert one(endpoint.url, ask()).text == "Down"


@pytest.mark.parametrize(
    ("status", "content", "times", "payload"),
    [
        (401, {"error": {"message": "bad key"}}, 1, r"answered 401 for model 'm': bad key. Fix: check the key in"),
        (
            404,
            {"error": {"message": "The model `m` does not exist"}},
            1,
            "does not exist. Fix: check model 'm' and base_url",
        ),
        (400, {"object": "error", "message": "too long"}, 1, "answered 400 for model 'm': too long."),
        (
            429,
            {"error": {"message": "quota"}},
            3,
            "quota. Fix: lower max_concurrency, or raise max_retries and retry_wait, 3 times",
        ),
        (503, b"<html>\nbusy</html>", 3, "answered 503 for model 'm': <html> busy</html>., 3 times"),
        (200, b"<html>", 1, "does not speak JSON: '<html>'. Fix: correct base_url"),
        (200, {"choices": []}, 1, "the endpoint's answer of Lake holds no choice"),
    ],
)
def test_a_refusal_ends_in_one_line(serve: Serve, status: int, content: Any, times: int, payload: str) -> None:
    endpoint = serve(lambda _: (status, content))
    assert payload in failure(endpoint.url, max_retries=2)
    assert len(endpoint.seen) == times


def test_an_endpoint_that_is_slow_or_not_there_is_reported(serve: Serve) -> None:
    endpoint = serve(lambda payload: (time.sleep(0.5), (200, said("x")))[1])
    assert (
        failure(endpoint.url, timeout=0.05, max_retries=1)
        == f"{endpoint.url} did not answer within timeout = 0.05 s, 2 times"
    )
    assert "http://127.0.0.1:9/v1 cannot be reached (ConnectError" in failure("http://127.0.0.1:9/v1", max_retries=0)


def test_no_more_requests_run_at_once_than_allowed(serve: Serve) -> None:
    running: list[int] = []
    most: list[int] = []

    def answer(payload: dict[str, Any]) -> tuple[int, Any]:
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return 200, said("x")

    endpoint = serve(answer)

    async def work(backend: OpenAIBackend) -> None:
        await asyncio.gather(*[backend.generate(ask(seed=seed)) for seed in range(7)])

    with_backend(endpoint.url, work, max_concurrency=2)
    assert len(most) == 7
    assert max(most) == 2


def test_abort_cancels_and_close_fails_what_waits(serve: Serve) -> None:
    endpoint = serve(lambda payload: (time.sleep(0.3), (200, said("x")))[1])

    async def work(backend: OpenAIBackend) -> None:
        request = ask()
        given_up, waiting = asyncio.create_task(backend.generate(request)), asyncio.create_task(backend.generate(ask()))
        await asyncio.sleep(0.05)
        await backend.abort(request)
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await backend.close()
        for task in (waiting, asyncio.create_task(backend.generate(ask()))):
            with pytest.raises(EngineError, match="the backend was closed"):
                await task

    with_backend(endpoint.url, work)


def test_what_can_be_known_before_is_reported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = OpenAIConfig(model="m", base_url="localhost:8000", api_key_env="NO_SUCH_KEY")
    address, key = OpenAIBackend.check(config, CONTEXT)
    assert "'localhost:8000' is no address" in address.text
    assert key.machine and "the environment variable NO_SUCH_KEY" in key.text
    with pytest.raises(MachineError, match="NO_SUCH_KEY"):
        OpenAIBackend(config, CONTEXT)
    assert OpenAIBackend.check(OpenAIConfig(model="m", api_key_env=None), CONTEXT) == []
    for wrong in ({}, {"model": ""}, {"model": "m", "timeout": 0}, {"model": "m", "max_concurrency": 0}):
        assert structure(OpenAIConfig, wrong)[1]


def turnwise(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnwise.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_eval_and_rollout_play_with_it_and_train_refuses(serve: Serve, tmp_path: Path) -> None:
    endpoint = serve(lambda payload: (200, said("Right")))
    (tmp_path / "run.yaml").write_text(README, encoding="utf-8")
    there = f"actor_infer.strategy_args.strategy_config.base_url={endpoint.url}"
    few = "val_env_manager.num_env_groups=3"
    done = turnwise("eval", "run.yaml", there, few, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert endpoint.seen
    assert endpoint.seen[-1][2]["messages"][-1]["role"] == "user"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    done = turnwise("rollout", "run.yaml", there, "--episodes", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'Right'" in done.stdout
    done = turnwise("train", "run.yaml", there, cwd=tmp_path)
    assert done.returncode != 0
    assert "gives no token ids" in done.stderr
    assert "Traceback" not in done.stderr
