"""One model's side of an episode: its conversation, its calls, and in the end its trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from attrs import asdict, evolve, frozen

from turnwise.contracts.chat import Chat, Message
from turnwise.contracts.env_manager import Sampler
from turnwise.contracts.environment import Response
from turnwise.data.trajectory import Generation, StopReason, Trajectory, Turn, float32, int32
from turnwise.errors import ConfigError, EngineError, EnvironmentFailure
from turnwise_managers.drift import Drift
from turnwise_managers.lengths import has_no_room
from turnwise_managers.rules import Rules
from turnwise_managers.samples import expert_indices
from turnwise_managers.templates import Content, join_content, text_of
from turnwise_managers.world import World


@frozen(eq=False)
class Prompt:
    """What one call is given: `ids` int32, or `messages` for a backend that takes those, and the indices of the images
    it holds.

    `compared`: whether it was also rendered anew; `drift`: how that rendering differs."""

    ids: np.ndarray | None
    messages: list[Message] | None
    images: tuple[int, ...]
    compared: bool = False
    drift: Drift | None = None


class Prompts(Protocol):
    """How the prompt of a line's coming call is made of what it was shown and what it answered
    (turnwise_managers.prompts)."""

    def longest(self, line: Line) -> int:
        """The most tokens that a prompt may hold."""
        ...

    def of(self, line: Line) -> Prompt:
        """The prompt of the coming call, whose messages are `line.shown[-1]`."""
        ...


class Line:
    """A conversation of one model about one world: `show` what it is to answer, `ask` it, and `act` on the answer where
    it is one.

    Every call is a turn of the line's trajectory. A call that is not acted on (a draft, a question of the manager's
    own) has no reward of its own. `shown[k]`: the messages before call k. `response`: the latest. `role`: whose line it
    is, where there are several; `sampler`: the model.
    """

    def __init__(self, world: World, sampler: Sampler, rules: Rules, prompts: Prompts, role: str = "") -> None:
        self.world, self.sampler, self.rules, self.prompts, self.role = world, sampler, rules, prompts, role
        self.turns: list[Turn] = []
        self.shown: list[list[Message]] = []
        self.stop: StopReason | None = None
        self.response = Response("", "stop")
        chat = world.episode.chat
        self._chat = None if chat is None else chat.with_args(rules.template_args)
        self._owed = 0.0
        self._acts = 0
        self._invalid = 0
        self._compared = False
        self._answered: int | None = None  # the step before which the latest call was made
        self._again = 0  # how many calls before it answered the same state

    # ---------------------------------------------------------------- what the model is shown

    def show(self, said: Content | list[Message] | None = None) -> None:
        """Put messages before the coming call: the current observation with the templates around it, or, as it is, what
        the manager itself says (text, content parts, or chat messages)."""
        assert len(self.shown) == len(self.turns), "show was called twice without a call between"
        if said is None:
            *others, last = self.world.messages()
            if not self.world.steps:
                # Those at the front of the first observation stand in `head` already.
                others = others[len(self.world.system) :]
            self.shown.append([*others, {**last, "content": self._dressed(last["content"])}])
        elif isinstance(said, list) and said and "role" in said[0]:
            self.shown.append(self.world.kept(said))
        else:
            self.shown.append([{"role": "user", "content": self.world.kept(said)}])

    def earlier(self) -> range:
        """The indices of the earlier calls that the coming prompt holds."""
        length = self.rules.history_length
        return range(0 if length is None else max(0, len(self.turns) - length), len(self.turns))

    def head(self) -> list[Message]:
        """The messages before the first call's: the system template, as it is, then a system message of the
        environment's own."""
        system: list[Message] = [] if self.rules.system is None else [{"role": "system", "content": self.rules.system}]
        return system + self.world.system

    def conversation(self, earlier: Sequence[int]) -> list[Message]:
        """The head, the named earlier calls with their responses, and the messages now shown."""
        messages = self.head()
        for index in earlier:
            messages += [*self.shown[index], {"role": "assistant", "content": self.turns[index].text}]
        return messages + self.shown[len(self.turns)]

    @property
    def chat(self) -> Chat:
        """The chat of a backend that takes ids, with the `template_args`."""
        assert self._chat is not None, "a backend of input ids needs the chat"
        return self._chat

    def rendered(self, messages: list[Message]) -> np.ndarray:
        """int32 ids of a whole conversation. Raises as `extended`."""
        world = self.world
        return self._by_chat(lambda chat: chat.render(messages, world.arrays(world.images_in(messages)), world.tools))

    def extended(self, so_far: np.ndarray, messages: list[Message]) -> np.ndarray:
        """int32 ids by which `messages` continue a prompt and its response.

        Raises EnvironmentFailure for what the chat cannot show, for one odd observation is no reason to end a run;
        ConfigError where it refuses the run's own system message, too."""
        images = self.world.images_in(messages)
        wrote = [k for k, turn in enumerate(self.turns) if self.chat.begins_image(turn.response_ids)] if images else []
        if wrote:
            raise EnvironmentFailure(
                f"the model wrote the tokens of an image in turn {wrote[0]} of {self.world.episode.tag}, and an image"
                " follows: no engine could tell the two apart. Fix: nothing, if it is rare; else env_manager:"
                " stepwise."
            )
        return self._by_chat(
            lambda chat: chat.extend(so_far, self.turns[-1].finish, messages, self.world.arrays(images))
        )

    def _by_chat(self, make: Callable[[Chat], np.ndarray]) -> np.ndarray:
        try:
            return int32(make(self.chat))
        except ConfigError as error:
            system: list[Message] = (
                [] if self.rules.system is None else [{"role": "system", "content": self.rules.system}]
            )
            # Raises where the run's own system message is what the chat refuses: a mistake of the configuration, not of
            # an observation.
            self.chat.render([*system, {"role": "user", "content": "x"}])
            raise EnvironmentFailure(
                f"{self.world.episode.tag} showed what the model's chat cannot: {error}"
            ) from error

    # ---------------------------------------------------------------- a call, and what became of it

    async def ask(self) -> bool:
        """One call of the model, which becomes a turn. False, and nothing is sent, where its prompt has no room: the
        line ends by `length`.

        Raises EngineError for a response that was aborted or does not keep the contract, EnvironmentFailure as
        `extended`."""
        assert len(self.shown) > len(self.turns), "ask was called before show: there is nothing to answer"
        prompt = None if self._without_room() else self.prompts.of(self)
        if prompt is None or (prompt.ids is not None and len(prompt.ids) > self.prompts.longest(self)):
            # Every message shown belongs to a call, and this one is not made.
            self.shown.pop()
            self.stop = "length"
            return False
        self._again = self._again + 1 if self._answered == self.world.steps else 0
        self._answered = self.world.steps
        generation = await self._generate(prompt)
        ids = int32([] if generation.ids is None else generation.ids)
        extras = _extras(generation, len(ids))
        if prompt.drift is not None:
            extras["drift"] = asdict(prompt.drift)
        self.response = Response.of(generation)
        self._compared |= prompt.compared
        anchor = self.world.anchor
        self.turns.append(
            Turn(
                prompt_ids=int32([] if prompt.ids is None else prompt.ids),
                response_ids=ids,
                response_mask=np.ones(len(ids), np.bool_),
                logprobs=None if generation.logprobs is None else float32(generation.logprobs),
                # −1: the backend counts no versions.
                versions=np.full(len(ids), -1, np.int32) if generation.versions is None else int32(generation.versions),
                reward=self._owed,
                # A draft is not compared with the answer after it, though both answer one state.
                anchor=(anchor, self._again) if self._again else anchor,
                observation=self.shown[-1] if self._again else self.world.observation,
                text=generation.text,
                finish=generation.finish,
                images=prompt.images,
                metrics={"drift": float(prompt.drift is not None)} if prompt.compared else {},
                extras=extras,
            )
        )
        self._owed = 0.0
        return True

    @property
    def action(self) -> str:
        """The action in the latest response: what a player chose, else what the pattern finds ('' for none). Raises
        EnvironmentFailure."""
        latest = self.turns[-1]
        # A player chooses an action, and writes no text around it.
        chosen = latest.extras.get("action")
        return self.rules.actions.find(latest.text, self.world.episode.tag) if chosen is None else str(chosen)

    async def act(self, action: str | None = None) -> float:
        """Give the environment the latest response's action (or another). Its reward, which is returned, is the latest
        turn's; without an action, the format penalty is added. Raises EnvironmentFailure."""
        assert self.turns, "act was called before ask: there is no response to act on"
        latest = self.turns[-1]
        action = self.action if action is None else action
        reward, metrics = await self.world.step(action, self.response)
        self._acts += 1
        # Without a pattern the whole response is the action, and an empty one is the environment's to judge.
        if self.rules.actions.pattern is not None and not action:
            self._invalid += 1
            reward += self.rules.format_penalty
        # No `0.0 +`: it would make 0.0 of a reward of −0.0, and a reward is kept as the environment gave it.
        whole = float(reward) if not latest.reward else latest.reward + float(reward)
        self.turns[-1] = evolve(latest, reward=whole, action=action, metrics=metrics | latest.metrics)
        return float(reward)

    def credit(self, reward: float) -> None:
        """Add a reward to the latest turn, or to the first one if no call was made yet (another's move, a judgement at
        the end)."""
        if self.turns:
            self.turns[-1] = evolve(self.turns[-1], reward=self.turns[-1].reward + reward)
        else:
            self._owed += reward

    @property
    def score(self) -> float:
        """The sum of the rewards so far."""
        return sum((turn.reward for turn in self.turns), self._owed)

    def trajectory(self, success: bool | None = None) -> Trajectory:
        """The finished line. `success`: of its own, where it is not the world's."""
        world, episode = self.world, self.world.episode
        metrics = dict(world.metrics)
        if self.rules.actions.pattern is not None and self._acts:
            # By acts, not by calls: a draft is asked for no action.
            metrics["invalid_actions"] = self._invalid / self._acts
        if self._compared:
            metrics["drift"] = sum(turn.metrics["drift"] for turn in self.turns) / len(self.turns)
        return Trajectory(
            tag=episode.tag,
            group=episode.group,
            member=episode.member,
            seed=episode.seed,
            turns=tuple(self.turns),
            # Its own first: another line may have ended the world after this one had no room left.
            stop_reason=self.stop or world.ended or "turns",
            success=world.success if success is None else success,
            attempt=episode.attempt,
            images=tuple(world.images),
            final_observation=world.observation,
            metrics=metrics,
            role=self.role,
        )

    async def _generate(self, prompt: Prompt) -> Generation:
        episode, world = self.world.episode, self.world
        most = min(episode.limits.max_new_tokens, episode.limits.max_tokens_per_step)
        if prompt.ids is not None:
            most = min(most, episode.limits.sequence_length - len(prompt.ids))
        # Counted over all lines of a world: request seeds derive from it, and two lines must not share one.
        number, world.calls = world.calls, world.calls + 1
        generation = await self.sampler.generate(
            turn=number,
            ids=prompt.ids,
            messages=prompt.messages,
            images=world.arrays(prompt.images),
            max_new_tokens=most,
            actions=world.actions,
        )
        # Not trusted: more tokens than asked for would overrun the training row.
        problem = _problem(generation, most, prompt.ids is not None)
        if problem:
            where = f"turn {len(self.turns)} of {episode.tag}, group {episode.group}, member {episode.member}"
            raise EngineError(f"the inference backend {problem}, in {where}")
        return generation

    def _without_room(self) -> bool:
        """Whether what is now shown is so long that it need not be rendered."""
        if self.sampler.input == "messages":
            return False
        return has_no_room(self.chat, text_of(self.conversation(())), self.prompts.longest(self))

    def _dressed(self, content: Content) -> Content:
        """The content with the templates around it."""
        rules = self.rules
        if rules.user is None and rules.before is None and rules.after is None:
            return content
        values = self._values(content)
        dressed = join_content(
            [
                rules.before.render(values) if rules.before else "",
                content,
                rules.after.render(values) if rules.after else "",
            ]
        )
        if rules.user is None:
            return dressed
        # Inside the user's template the observation already wears those of the step.
        return rules.user.render(values | {"observation": dressed, "current_observation": dressed})

    def _values(self, content: Content) -> dict[str, Any]:
        limits, taken = self.world.episode.limits, self.world.steps
        return {
            "turn_idx": taken + 1,
            "observation": content,
            "actions_left": limits.max_turns - taken,
            "max_response_length": min(limits.max_tokens_per_step, limits.max_new_tokens),
            "env_instruction": self.world.instruction,
            "step_count": taken,
            "current_step": taken + 1,
            "current_observation": content,
            "history_length": len(self.earlier()),
            "history": ", ".join(self._summary(index) for index in self.earlier())
            if self.rules.history_in_text
            else "",
        }

    def _summary(self, index: int) -> str:
        turn = self.turns[index]
        return (
            f"(step:{index + 1}, observation: {text_of(turn.observation)}, action: {turn.action or turn.text.strip()})"
        )


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
