"""Playing one episode, which both managers share: observations become messages, responses become actions and turns."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from attrs import asdict, frozen

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode, Sampler
from turnwise.data.trajectory import Generation, StopReason, Trajectory, Turn, float32, int32
from turnwise.errors import EngineError, EnvironmentFailure
from turnwise_managers.config import ManagerConfig
from turnwise_managers.drift import Drift
from turnwise_managers.samples import expert_indices
from turnwise_managers.templates import Content, Template, join_content, parse_template, text_of


@frozen
class Rules:
    """A manager's options, made ready once: the compiled pattern and the parsed templates."""

    pattern: re.Pattern[str] | None
    format_penalty: float
    system: str | None
    user: Template | None
    before: Template | None
    after: Template | None
    history_length: int | None = None

    @classmethod
    def of(cls, config: ManagerConfig, history_length: int | None = None) -> Rules:
        """The rules that `config` states."""
        return cls(
            pattern=None if config.action_pattern is None else re.compile(config.action_pattern, re.DOTALL),
            format_penalty=config.format_penalty,
            system=config.agent_system_template,
            user=_parsed("agent_template", config.agent_template),
            before=_parsed("pre_step_template", config.pre_step_template),
            after=_parsed("next_step_template", config.next_step_template),
            history_length=history_length,
        )

    @property
    def history_in_text(self) -> bool:
        """Whether the user's message itself tells the earlier turns."""
        return any(template is not None and "history" in template.names for template in (self.user, self.before, self.after))

    def action(self, text: str) -> str:
        """The action in a response; the empty string if the pattern finds nothing."""
        if self.pattern is None:
            return text.strip()
        match = self.pattern.search(text)
        return (match[self.pattern.groups] or "").strip() if match else ""


@frozen(eq=False)
class Prompt:
    """What one call is given: `ids` int32, or `messages` for a backend that takes those, and the indices of the images it holds.

    `compared`: whether it was also rendered anew; `drift`: how that rendering differs."""

    ids: np.ndarray | None
    messages: list[Message] | None
    images: tuple[int, ...]
    compared: bool = False
    drift: Drift | None = None


class Play:
    """The state of one episode between two calls of the model."""

    def __init__(self, rules: Rules, episode: Episode) -> None:
        self.rules = rules
        self.episode = episode
        self.turns: list[Turn] = []
        self.shown: list[list[Message]] = []
        self.images: list[np.ndarray] = []
        self.tools: list[dict[str, Any]] | None = None
        self.actions: tuple[str, ...] = ()
        self.observation: Any = ""
        self._anchor: Any = ""
        self._instruction = ""
        self._first: list[Message] = []
        self._success: bool | None = None
        self._metrics: dict[str, float] = {}
        self._invalid = 0
        self._compared = False
        self._by_content: dict[tuple[Any, ...], np.ndarray] = {}
        self._index: dict[int, int] = {}

    async def begin(self) -> None:
        """Reset the environment."""
        observation, info = await self.episode.environment.reset()
        self._take(observation, info)
        self.tools = info.get("tools")
        self._instruction = str(info.get("env_instruction", text_of(self.observation)))

    def show(self) -> None:
        """Turn the current observation into the messages of the coming call; the last of them carries the templates."""
        *others, last = _messages(self.observation)
        if not self.shown:  # a system message of the environment's own stays in front, whatever the history later leaves out
            while others and others[0]["role"] == "system":
                self._first.append(others.pop(0))
        self.shown.append([*others, {**last, "content": self._dressed(last["content"])}])

    def earlier(self) -> range:
        """The indices of the earlier turns that the coming prompt tells."""
        length = self.rules.history_length
        return range(0 if length is None else max(0, len(self.turns) - length), len(self.turns))

    def head(self) -> list[Message]:
        """The messages before the first turn's: the system template, as it is, then a system message of the environment's own."""
        system: list[Message] = [] if self.rules.system is None else [{"role": "system", "content": self.rules.system}]
        return system + self._first

    def conversation(self, earlier: Sequence[int]) -> list[Message]:
        """The head, the named earlier turns with their responses, and the messages now shown."""
        messages = self.head()
        for index in earlier:
            messages += [*self.shown[index], {"role": "assistant", "content": self.turns[index].text}]
        return messages + self.shown[len(self.turns)]

    def images_in(self, messages: Iterable[Message]) -> tuple[int, ...]:
        """Indices of the images in these messages, in their order."""
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        return tuple(self._index[id(part["image"])] for content in contents for part in content if part.get("type") == "image")

    def arrays(self, images: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The images behind these indices."""
        return tuple(self.images[index] for index in images)

    async def answer(self, prompt: Prompt, generation: Generation) -> StopReason | None:
        """Give the response to the environment and record the turn; why the episode ended, if the environment ended it."""
        chosen = generation.extras.get("action")  # a player chooses an action and writes no text around it
        action = self.rules.action(generation.text) if chosen is None else str(chosen)
        ids = int32([] if generation.ids is None else generation.ids)
        anchor, seen = self._anchor, self.observation
        observation, reward, terminated, truncated, info = await self.episode.environment.step(action)
        if self.rules.pattern is not None and not action:
            self._invalid += 1
            reward += self.rules.format_penalty
        metrics, extras = self._take(observation, info), _extras(generation, len(ids))
        if prompt.compared:
            metrics["drift"] = float(prompt.drift is not None)
            self._compared = True
        if prompt.drift is not None:
            extras["drift"] = asdict(prompt.drift)
        self.turns.append(
            Turn(
                prompt_ids=int32([] if prompt.ids is None else prompt.ids),
                response_ids=ids,
                response_mask=np.ones(len(ids), np.bool_),
                logprobs=None if generation.logprobs is None else float32(generation.logprobs),
                versions=np.full(len(ids), -1, np.int32) if generation.versions is None else int32(generation.versions),
                reward=float(reward),
                anchor=anchor,
                observation=seen,
                text=generation.text,
                action=action,
                finish=generation.finish,
                images=prompt.images,
                metrics=metrics,
                extras=extras,
            )
        )
        return "terminated" if terminated else "truncated" if truncated else None

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        """The finished episode."""
        metrics = dict(self._metrics)
        if self.rules.pattern is not None and self.turns:
            metrics["invalid_actions"] = self._invalid / len(self.turns)
        if self._compared:
            metrics["drift"] = sum(turn.metrics["drift"] for turn in self.turns) / len(self.turns)
        episode = self.episode
        return Trajectory(
            tag=episode.tag,
            group=episode.group,
            member=episode.member,
            seed=episode.seed,
            turns=tuple(self.turns),
            stop_reason=stop_reason,
            success=self._success,
            attempt=episode.attempt,
            images=tuple(self.images),
            final_observation=self.observation,
            metrics=metrics,
        )

    def _take(self, observation: Any, info: dict[str, Any]) -> dict[str, float]:
        """Note what the environment told; returns the metrics of this answer."""
        self.observation = self._kept(observation)
        key = info.get("state_key")
        self._anchor = self.observation if key is None else copy.deepcopy(key)  # an environment may go on writing into its state
        if info.get("success") is not None:
            self._success = bool(info["success"])
        if info.get("actions") is not None:
            if not isinstance(info["actions"], (list, tuple)):
                raise EnvironmentFailure(f"{self.episode.tag} told the actions {info['actions']!r:.80}. Fix: info['actions'] is a list of texts.")
            self.actions = tuple(str(action) for action in info["actions"])
        try:
            metrics = {str(name): float(value) for name, value in (info.get("metrics") or {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            told = f"{info['metrics']!r:.80}"
            raise EnvironmentFailure(f"{self.episode.tag} told the metrics {told}. Fix: info['metrics'] maps names to numbers.") from error
        self._metrics |= metrics
        return metrics

    def _dressed(self, content: Content) -> Content:
        """The content with the templates around it."""
        rules = self.rules
        if rules.user is None and rules.before is None and rules.after is None:
            return content
        values = self._values(content)
        dressed = join_content([rules.before.render(values) if rules.before else "", content, rules.after.render(values) if rules.after else ""])
        if rules.user is None:
            return dressed
        return rules.user.render(values | {"observation": dressed, "current_observation": dressed})

    def _values(self, content: Content) -> dict[str, Any]:
        limits, taken = self.episode.limits, len(self.turns)
        return {
            "turn_idx": taken + 1,
            "observation": content,
            "actions_left": limits.max_turns - taken,
            "max_response_length": min(limits.max_tokens_per_step, limits.max_new_tokens),
            "env_instruction": self._instruction,
            "step_count": taken,
            "current_step": taken + 1,
            "current_observation": content,
            "history_length": len(self.earlier()),
            "history": ", ".join(self._told(index) for index in self.earlier()) if self.rules.history_in_text else "",
        }

    def _told(self, index: int) -> str:
        turn = self.turns[index]
        return f"(step:{index + 1}, observation: {text_of(turn.observation)}, action: {turn.action or turn.text.strip()})"

    def _kept(self, value: Any) -> Any:
        """A copy of an observation's structure (the environment may reuse its own), each different image stored once."""
        if isinstance(value, list):
            return [self._kept(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "role" in value:
            content = value["content"]
            if not isinstance(content, str) and not (
                isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
            ):
                raise EnvironmentFailure(f"{self.episode.tag} showed the message {value!r:.80}. Fix: its content is a string or a list of parts.")
            return {**value, "content": self._kept(content)}
        if value.get("type") == "image":
            return {**value, "image": self._stored(value.get("image"))}
        if value.get("type") == "text" and not isinstance(value.get("text"), str):
            raise EnvironmentFailure(f"{self.episode.tag} showed the text part {value!r:.80}. Fix: its 'text' is a string.")
        return dict(value)

    def _stored(self, image: Any) -> np.ndarray:
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            was = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            raise EnvironmentFailure(f"{self.episode.tag} showed an image that is {was}. Fix: a uint8 array of height × width × 3.")
        content = (image.shape, hashlib.blake2b(image.tobytes()).digest())
        if content not in self._by_content:
            stored = self._by_content[content] = np.array(image, order="C")
            self._index[id(stored)] = len(self.images)
            self.images.append(stored)
        return self._by_content[content]


async def play(rules: Rules, episode: Episode, sampler: Sampler, prompt_of: Callable[[Play], Prompt], longest: int) -> Trajectory:
    """Play an episode: `prompt_of` makes each prompt, and one of more than `longest` tokens ends the episode instead of being sent.

    Raises EngineError for a response that was aborted or does not keep the contract; EnvironmentFailure passes through."""
    state = Play(rules, episode)
    await state.begin()
    stop: StopReason | None = None
    while stop is None and len(state.turns) < episode.limits.max_turns:
        state.show()
        prompt = prompt_of(state)
        if prompt.ids is not None and len(prompt.ids) > longest:
            stop = "length"
            break
        generation = await _generate(state, sampler, prompt)
        stop = await state.answer(prompt, generation)
    return state.trajectory(stop or "turns")


async def _generate(state: Play, sampler: Sampler, prompt: Prompt) -> Generation:
    limits = state.episode.limits
    most = min(limits.max_new_tokens, limits.max_tokens_per_step)
    if prompt.ids is not None:
        most = min(most, limits.sequence_length - len(prompt.ids))
    generation = await sampler.generate(
        turn=len(state.turns),
        ids=prompt.ids,
        messages=prompt.messages,
        images=state.arrays(prompt.images),
        max_new_tokens=most,
        actions=state.actions,
    )
    problem = _problem(generation, most, prompt.ids is not None)
    if problem:
        episode = state.episode
        where = f"turn {len(state.turns)} of {episode.tag}, group {episode.group}, member {episode.member}"
        raise EngineError(f"the inference backend {problem}, in {where}")
    return generation


def _problem(generation: Generation, most: int, counted: bool) -> str:
    """How a generation breaks its contract; the empty string if it keeps it."""
    if generation.finish == "abort":
        return "aborted the request"
    if generation.ids is None:
        return "took token ids but returned none" if counted else ""
    count = len(generation.ids)
    if counted and count > most:
        return f"returned {count} tokens where {most} were allowed"
    for name in ("logprobs", "versions"):
        values = getattr(generation, name)
        if values is not None and len(values) != count:
            return f"returned {count} tokens but {len(values)} {name}"
    return ""


def _extras(generation: Generation, count: int) -> dict[str, Any]:
    """The generation's extras; expert indices are one entry per sampled token, an empty list is none at all."""
    extras = dict(generation.extras)
    indices = expert_indices(extras.pop("expert_indices", None), count)
    return extras if indices is None else extras | {"expert_indices": indices}


def _parsed(key: str, text: str | None) -> Template | None:
    return None if text is None else parse_template(key, text)


def _messages(observation: Any) -> list[Message]:
    """An observation as chat messages."""
    if isinstance(observation, list) and observation and "role" in observation[0]:
        return list(observation)
    return [{"role": "user", "content": observation or ""}]
