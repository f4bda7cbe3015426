"""Environments: Gymnasium's API over text, chat messages, or content parts with images."""

from __future__ import annotations

import inspect
import math
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

from attrs import frozen

from turnwise.contracts.capabilities import Capabilities
from turnwise.data.numbers import LARGEST_REWARD
from turnwise.data.trajectory import Generation
from turnwise.errors import EnvironmentFailure

Observation = Any
"""A string, a list of chat messages, or a list of content parts: what `check_observation` lets through."""
Info = dict[str, Any]
"""What an environment says beside the observation; the keys that are read stand at `Environment`."""


@frozen
class Response:
    """What the model wrote, whole, in which the manager found the action: for rewards of form and length.

    `text` (thinking and marks included), `finish` (`stop`, or `length` where it was cut), `tokens`: how many were
    sampled (None where the backend does not report it)."""

    text: str
    finish: str
    tokens: int | None = None

    @classmethod
    def of(cls, generation: Generation) -> Response:
        """The response that a model gave."""
        return cls(generation.text, generation.finish, None if generation.ids is None else len(generation.ids))


@frozen
class EnvironmentCapabilities(Capabilities):
    """`replayable`: the same seed and actions give the same episode, so that one which is open when a run is killed goes
    on where it was; False: it starts anew."""

    kind: ClassVar[str] = "environment"
    replayable: bool = True


@runtime_checkable
class Environment(Protocol):
    """Built with `env_config` as keyword arguments, one instance an episode at a time; `step` and `reset` may be
    coroutines.

    Observations: a string; a list of chat messages (`{"role", "content"}`); or a list of content parts (`{"type":
    "text", "text"}`, `{"type": "image", "image": uint8 H×W×3}`). `step` gets the model's text, or what the manager
    found in it to be the action (the empty string when it found nothing: an invalid action). `info` may hold
    `state_key` (hashable or array: the state after this call), `success` (bool), `metrics` (name → number), `actions`
    (the legal texts, for the random player), `answer` (a text that is right now, as the next action: the conformance kit
    plays it) and, at reset, `tools` (JSON schemas for the chat template) and `env_instruction` (what templates show as
    `{env_instruction}`). A data-set environment has the attribute `num_tasks`
    and gets `options={"index": i}`. A `step` that has the parameter `response` is given the whole `Response` under that
    name: `def step(self, action, response=None)`. It may be None, from a manager that has none.
    Optional: `render()` → uint8 H×W×3 array or a string, `close()`. What it can do beyond that it declares as
    EnvironmentCapabilities.
    """

    # Any: Gymnasium's options
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode. The same seed (0 ≤ seed < 2**32) gives the same episode for the same actions, at whatever
        time; global random state is not touched."""
        ...

    def step(self, action: str) -> tuple[Observation, float, bool, bool, Info]:
        """Answer an action with (observation, reward, terminated, truncated, info)."""
        ...


def takes_response(environment: Environment) -> bool:
    """Whether the environment's `step` has the parameter `response`."""
    kind: Any = type(environment)
    return _takes_response(kind)


@lru_cache(maxsize=1024)
def _takes_response(cls: Any) -> bool:
    try:
        return "response" in inspect.signature(cls.step).parameters
    except (AttributeError, TypeError, ValueError):
        # No step (reported when it is called), or one that has no signature.
        return False


def check_observation(value: object, where: str) -> Observation:
    """Return `value` if it is an observation; raise EnvironmentFailure with what it was instead."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        messages = all("role" in part and "content" in part for part in value)
        parts = all(part.get("type") in ("text", "image") for part in value)
        if messages or parts:
            return value
    raise EnvironmentFailure(
        f"{where} returned {value!r:.80} ({type(value).__name__}) as the observation. "
        "Fix: return a string, a list of chat messages, or a list of content parts of type text or image."
    )


def check_reset(result: object, where: str) -> tuple[Observation, Info]:
    """Check what `reset` returned: (observation, info)."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvironmentFailure(
            f"{where}.reset returned {result!r:.80}. Fix: return (observation, info), info a dict."
        )
    return check_observation(result[0], f"{where}.reset"), result[1]


def check_step(result: object, where: str) -> tuple[Observation, float, bool, bool, Info]:
    """Check what `step` returned: five values and a reward that float32 holds; the flags are taken as booleans."""
    if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
        raise EnvironmentFailure(
            f"{where}.step returned {result!r:.80}. Fix: return (observation, reward, terminated, truncated, info)."
        )
    observation, reward, terminated, truncated, info = result
    try:
        # numpy scalars and tensors of one number are rewards too.
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= LARGEST_REWARD:  # nan is not
        raise EnvironmentFailure(
            f"{where}.step returned the reward {reward!r:.80}. Fix: return a finite number, of float32's range."
        )
    return check_observation(observation, f"{where}.step"), number, bool(terminated), bool(truncated), info
