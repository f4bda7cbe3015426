"""One episode as it was played: generations, turns, the trajectory, and the training samples cut from it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from attrs import field, frozen

StopReason = Literal["terminated", "truncated", "length", "turns"]
"""Why a trajectory ended: the environment's end, the environment's time limit, no room for another token, the turn limit of the tag."""


def int32(values: Any) -> np.ndarray:  # Any: whatever numpy takes
    """A contiguous int32 array (token ids, versions)."""
    return np.ascontiguousarray(values, dtype=np.int32)


def float32(values: Any) -> np.ndarray:  # Any: whatever numpy takes
    """A contiguous float32 array (log-probs, rewards)."""
    return np.ascontiguousarray(values, dtype=np.float32)


@frozen(eq=False)
class Generation:
    """What an inference backend sampled for one request.

    `ids` int32 [n] are exactly the sampled tokens, the stop token included when it was sampled. `logprobs` float32 [n]
    follow the definition of a log-prob in docs/backends.md, or None where the backend cannot give them. `versions`
    int32 [n]: the policy version that sampled each token. Backends of `input: messages` may leave `ids` None. A player
    that chose an action, not a text, gives it in `extras["action"]`: managers take it as it is.
    """

    text: str
    ids: np.ndarray | None
    logprobs: np.ndarray | None
    versions: np.ndarray | None
    finish: Literal["stop", "length", "abort"]
    extras: dict[str, Any] = field(factory=dict)

    @property
    def tokens(self) -> int:
        """How many were sampled, as far as the backend tells."""
        return 0 if self.ids is None else len(self.ids)


@frozen(eq=False)
class Turn:
    """One model call and the environment's answer to it.

    `prompt_ids` int32 [p]: every token that the model saw before its response. `response_ids` int32 [n] and
    `response_mask` bool [n]:
    True for tokens that the engine sampled, False for tokens appended so that parsers see a closed message. `logprobs`
    float32 [n] or None, `versions` int32 [n] (−1 where not sampled). `anchor`: the state before the call (the
    environment's `state_key`, else the observation that the action answered). `observation`: what the
    call was shown, by the environment or by the manager itself. `images`: indices into `Trajectory.images` that the
    prompt holds.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    response_mask: np.ndarray
    logprobs: np.ndarray | None
    versions: np.ndarray
    reward: float
    anchor: Any
    observation: Any = ""
    text: str = ""
    action: str = ""
    finish: str = "stop"
    images: tuple[int, ...] = ()
    metrics: dict[str, float] = field(factory=dict)
    extras: dict[str, Any] = field(factory=dict)


@frozen(eq=False)
class Trajectory:
    """All turns of one episode, in order. It may have no turn at all (a first prompt over the limit); its score still
    counts.

    `role`: whose trajectory it is where an episode gives several (two players, a proposer and a critic), else empty. A
    group's members of one role are compared with each other alone."""

    tag: str
    group: int
    member: int
    seed: int
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    success: bool | None = None
    attempt: int = 0
    images: tuple[np.ndarray, ...] = ()
    final_observation: Any = ""
    metrics: dict[str, float] = field(factory=dict)
    role: str = ""

    @property
    def score(self) -> float:
        """The sum of the trajectory's rewards."""
        return float(sum(turn.reward for turn in self.turns))


@frozen(eq=False)
class Sample:
    """One training row: a run of tokens of one trajectory.

    All arrays have length L. `input_ids` int32; `response_mask` bool, True on sampled tokens only (never at position 0:
    a token needs one before it); `turn` int32, the index of the turn whose sampling gave the token, −1 elsewhere;
    `logprobs` float32, 0 elsewhere, or None if any sampled token lacks one; `versions` int32, −1 elsewhere. `columns`:
    further per-token data of shape [L, …] by name.
    """

    input_ids: np.ndarray
    response_mask: np.ndarray
    turn: np.ndarray
    logprobs: np.ndarray | None
    versions: np.ndarray
    images: tuple[int, ...] = ()
    columns: dict[str, np.ndarray] = field(factory=dict)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one (all of them if none was sampled)."""
        return int(self.response_mask.argmax()) if self.response_mask.any() else len(self.input_ids)

    @property
    def response_length(self) -> int:
        """Tokens from the first sampled one to the end."""
        return len(self.input_ids) - self.prompt_length
