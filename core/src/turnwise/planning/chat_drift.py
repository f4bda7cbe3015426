"""Whether the model's chat template writes earlier turns as the model wrote them: short episodes of a random player,
before training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from attrs import evolve

from turnwise.config.schema import RunConfig
from turnwise.contracts.chat import Chat
from turnwise.contracts.env_manager import Limits
from turnwise.contracts.inference import Request
from turnwise.contracts.player import Player
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.data.trajectory import Generation, Turn, int32
from turnwise.errors import TurnwiseError
from turnwise.planning import assembly
from turnwise.planning.plan import manager_capabilities
from turnwise.rollout import Scheduler

THINKING = "<think>\nThis looks best.\n</think>\n\n"
TURNS = 3
# Enough for any template: no episode of the trial shall end for want of room.
ROOM = Limits(sequence_length=2**20, max_new_tokens=4096, max_tokens_per_step=4096, max_turns=TURNS)


class _Writer(Player):
    """Chooses among the legal actions by the request's seed, and writes `before` and its choice in tokens, closed as a
    model closes its turn."""

    input: Literal["ids", "messages"] = "ids"

    def __init__(self, chat: Chat, before: str) -> None:
        self._chat, self._before = chat, before

    async def generate(self, request: Request) -> Generation:
        """A legal action, or `go on` where none are given."""
        rng = np.random.default_rng(request.seed)
        action = str(rng.choice(request.actions)) if request.actions else "go on"
        assert request.ids is not None
        # As text inside the turn, so that the tokens are those that a model may sample.
        written = self._chat.continue_text(request.ids, self._before + action)
        ids = int32(np.concatenate([written, self._chat.stop_ids[:1]]))
        return Generation(self._chat.decode(ids), ids, None, None, "stop", {"action": action})


def drift_warnings(config: RunConfig, base: Path) -> list[str]:
    """One line for each training tag whose manager can look for drift and finds it with this model's chat template.

    Only for a model folder: nothing is fetched or made here. The template is tried with responses of an action alone,
    then with thinking before it, which many templates leave out of earlier turns. Raises ConfigError for a folder
    without a usable chat template.
    """
    config = assembly.with_seed_files(config, base)
    folder = Path(config.pretrain) if isinstance(config.pretrain, str) else None
    if folder is None or not folder.is_dir():
        return []
    custom = {
        tag: (env, option)
        for tag, env in config.custom_envs.items()
        if (option := manager_capabilities(env).drift_option)
    }
    # The option is for this try alone: whether the run itself looks for drift is the user's choice.
    watching = {
        tag: evolve(env, env_manager=evolve(env.env_manager, config=evolve(env.env_manager.config, **{option: True})))
        for tag, (env, option) in custom.items()
    }
    config = evolve(config, custom_envs={**config.custom_envs, **watching})
    plans = assembly.tag_plans(config, config.train_env_manager, config.actor_infer.generating_args, base)
    plans = [plan for plan in plans if plan.tag in watching]
    if not plans:
        return []
    chat = assembly.model_source(config, base).chat(folder)
    return [line for plan in plans for line in _tried(plan, chat, config)]


def _tried(plan: TagPlan, chat: Chat, config: RunConfig) -> list[str]:
    where = f"custom_envs.{plan.tag}.env_manager"
    for before, how in (
        ("", "responses of an action alone"),
        (THINKING, "responses with <think>…</think> before the action"),
    ):
        try:
            turns = asyncio.run(
                _played(
                    evolve(
                        plan, groups=1, group_size=1, limits=evolve(ROOM, max_turns=min(TURNS, plan.limits.max_turns))
                    ),
                    chat,
                    before,
                    config,
                )
            )
        except TurnwiseError as error:
            return [f"{where}: whether the chat template drifts could not be tried: {error}"]
        drifting = [k for k, turn in enumerate(turns) if turn.metrics.get("drift")]
        if drifting:
            found = turns[drifting[0]].extras["drift"]
            numbers = ", ".join(map(str, drifting))
            return [
                f"{where}: the chat template writes earlier turns otherwise than they were sampled: the prompts of"
                f" turns {numbers} of {len(turns)} differ ({how}), first {found['used']!r} where the template writes"
                f" {found['rendered']!r}. Training keeps the sampled tokens; a server that renders messages would not."
                " Fix: serve tokens, train with env_manager: stepwise, or change the template."
            ]
    return []


async def _played(plan: TagPlan, chat: Chat, before: str, config: RunConfig) -> Sequence[Turn]:
    manager = config.train_env_manager
    settings = RolloutSettings(
        seed=config.seed,
        step_timeout=manager.step_timeout,
        reset_timeout=manager.reset_timeout,
        max_env_failure_rate=0.5,
    )
    scheduler = Scheduler([plan], settings, _Writer(chat, before), chat)
    try:
        played = await scheduler.next_batch(0, version=0)
    finally:
        await scheduler.close()
    return played.trajectories[0].turns
