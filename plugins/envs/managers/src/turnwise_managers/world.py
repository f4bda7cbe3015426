"""The environment's side of an episode: what it shows and reports, kept so that one or several lines can play it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode
from turnwise.contracts.environment import Response
from turnwise.data.trajectory import StopReason
from turnwise.errors import EnvironmentFailure
from turnwise_managers.templates import text_of


class World:
    """The state of one environment between two steps.

    `observation` and `anchor` (its state key, else the observation) are what the coming call answers. `actions`,
    `tools`, `success` and `metrics` are as reported last, `instruction` and `system` (a leading system message of the
    first observation) as reported at reset.
    `steps`: how many were taken. `calls`: how many times a model was asked, by whichever line. `ended`: why the
    environment ended the episode.
    """

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.observation: Any = ""
        self.anchor: Any = ""
        self.instruction = ""
        self.system: list[Message] = []
        self.tools: list[dict[str, Any]] | None = None
        self.actions: tuple[str, ...] = ()
        self.success: bool | None = None
        self.metrics: dict[str, float] = {}
        self.steps = 0
        self.calls = 0
        self.ended: StopReason | None = None
        self.images: list[np.ndarray] = []
        self._by_content: dict[tuple[Any, ...], np.ndarray] = {}
        # By `id` of a stored array: a message holds the very object (`kept`), and it lives as long as the world.
        self._index: dict[int, int] = {}

    @property
    def going(self) -> bool:
        """Whether another step may be taken: the environment has not ended the episode, and the limit of turns leaves
        one."""
        return self.ended is None and self.steps < self.episode.limits.max_turns

    async def begin(self) -> World:
        """Reset the environment. Raises EnvironmentFailure."""
        observation, info = await self.episode.environment.reset()
        self._take(observation, info)
        self.tools = info.get("tools")
        self.instruction = str(info.get("env_instruction", text_of(self.observation)))
        *others, _ = self.messages()
        # It stays in front, whatever the history later leaves out.
        while others and others[0]["role"] == "system":
            self.system.append(others.pop(0))
        return self

    async def step(self, action: str, response: Response) -> tuple[float, dict[str, float]]:
        """Give the environment an action and the response that holds it. Returns the reward and the metrics of its
        answer.

        Raises EnvironmentFailure."""
        observation, reward, terminated, truncated, info = await self.episode.environment.step(action, response)
        self.steps += 1
        metrics = self._take(observation, info)
        # An environment that reports both has ended by itself.
        self.ended = "terminated" if terminated else "truncated" if truncated else None
        return reward, metrics

    def messages(self) -> list[Message]:
        """The current observation as chat messages, at least one."""
        observation = self.observation
        if isinstance(observation, list) and observation and "role" in observation[0]:
            return list(observation)
        return [{"role": "user", "content": observation or ""}]

    def images_in(self, messages: Iterable[Message]) -> tuple[int, ...]:
        """Indices of the images in these messages, in their order."""
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        return tuple(
            self._index[id(part["image"])] for content in contents for part in content if part.get("type") == "image"
        )

    def arrays(self, images: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The images behind these indices."""
        return tuple(self.images[index] for index in images)

    def kept(self, value: Any) -> Any:
        """A copy of the structure of an observation or message (its owner may reuse it), each different image stored
        once.

        Raises EnvironmentFailure for a part that is neither text nor image."""
        if isinstance(value, list):
            return [self.kept(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "role" in value:
            content = value["content"]
            if not isinstance(content, str) and not (
                isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
            ):
                raise EnvironmentFailure(
                    f"{self.episode.tag} showed the message {value!r:.80}. Fix: its content is a string or a list of"
                    " parts."
                )
            return {**value, "content": self.kept(content)}
        if value.get("type") == "image":
            return {**value, "image": self._stored(value.get("image"))}
        if value.get("type") == "text" and not isinstance(value.get("text"), str):
            raise EnvironmentFailure(
                f"{self.episode.tag} showed the text part {value!r:.80}. Fix: its 'text' is a string."
            )
        return dict(value)

    def _take(self, observation: Any, info: dict[str, Any]) -> dict[str, float]:
        """Note what the environment reported; returns the metrics of this answer."""
        self.observation = self.kept(observation)
        key = info.get("state_key")
        # Copied, for an environment may go on writing into its state.
        self.anchor = self.observation if key is None else copy.deepcopy(key)
        if info.get("success") is not None:
            self.success = bool(info["success"])
        if info.get("actions") is not None:
            if not isinstance(info["actions"], (list, tuple)):
                raise EnvironmentFailure(
                    f"{self.episode.tag} reported the actions {info['actions']!r:.80}. Fix: info['actions'] is a list of"
                    " texts."
                )
            self.actions = tuple(str(action) for action in info["actions"])
        try:
            metrics = {str(name): float(value) for name, value in (info.get("metrics") or {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            shown = f"{info['metrics']!r:.80}"
            raise EnvironmentFailure(
                f"{self.episode.tag} reported the metrics {shown}. Fix: info['metrics'] maps names to numbers."
            ) from error
        self.metrics |= metrics
        return metrics

    def _stored(self, image: Any) -> np.ndarray:
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            was = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            raise EnvironmentFailure(
                f"{self.episode.tag} showed an image that is {was}. Fix: a uint8 array of height × width × 3."
            )
        # With the shape: the same bytes in other rows are another image.
        content = (image.shape, hashlib.blake2b(image.tobytes()).digest())
        if content not in self._by_content:
            stored = self._by_content[content] = np.array(image, order="C")
            self._index[id(stored)] = len(self.images)
            self.images.append(stored)
        return self._by_content[content]
