"""The environments' own texts: a few random episodes, recorded as a model would have seen them (to train a tokenizer
on)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from attrs import evolve

from turnwise.config.schema import EnvManagerConfig
from turnwise.contracts.chat import Message
from turnwise.contracts.inference import Request
from turnwise.contracts.player import Player, chosen
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.data.trajectory import Generation
from turnwise.errors import NOTE, EnvironmentFailure, Interrupted
from turnwise.rollout import Scheduler

log = logging.getLogger("turnwise")

# Of random play: enough to see the words of small environments.
EPISODES = 64
# Seconds until Ctrl-C is heard: it is asked for, since the request to stop belongs to another thread's loop.
HEARD_WITHIN = 0.1


class _Recorder(Player):
    """A player that chooses among the legal actions and writes down every message that it is shown."""

    def __init__(self) -> None:
        # A dictionary for a set: it keeps the order in which they were seen, and the tokenizer must not depend on
        # hashes.
        self.texts: dict[tuple[str, str], None] = {}

    async def generate(self, request: Request) -> Generation:
        """A random legal action, or the empty text where none are given."""
        for message in request.messages or ():
            content = message["content"]
            parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
            self.texts.update(dict.fromkeys((message["role"], part) for part in parts))
        self.texts.update(dict.fromkeys(("assistant", action) for action in request.actions))
        rng = np.random.default_rng(request.seed)
        return chosen(str(rng.choice(request.actions)) if request.actions else "")


def environment_texts(
    plans: Sequence[tuple[TagPlan, EnvManagerConfig]], seed: int, stopping: Callable[[], bool] = lambda: False
) -> list[Message]:
    """Every distinct text, as a message with its role, of `EPISODES` random episodes of each plan, in the order seen.

    The timeouts, the retries and the failure rate are those of the plan's manager. `stopping` is asked while they play:
    it may be called from any thread. Raises EnvironmentFailure past that rate, and Interrupted.
    """
    found: list[tuple[str, str]] = []
    tags = ", ".join(plan.tag for plan, _ in plans)
    # Environments may be slow, and nothing else is seen of these episodes.
    log.info("playing %d random episodes of %s: the recipe's tokenizer learns from them", EPISODES, tags, extra=NOTE)

    async def play() -> None:
        for plan, manager in plans:
            recorder = _Recorder()
            # Each with a task of its own.
            few = evolve(plan, groups=EPISODES, group_size=1)
            scheduler = Scheduler([few], _settings(manager, seed), recorder, None)
            try:
                await _unless(stopping, scheduler)
            except EnvironmentFailure as failure:
                what = f"random episodes of {plan.tag}, from which the recipe's tokenizer learns: {failure}"
                raise EnvironmentFailure(what) from failure
            finally:
                await scheduler.close()
            found.extend(recorder.texts)

    # On a thread of its own: a loop may already run on this one.
    with ThreadPoolExecutor(1, thread_name_prefix="turnwise-texts") as pool:
        pool.submit(asyncio.run, play()).result()
    return [{"role": role, "content": text} for role, text in dict.fromkeys(found)]


async def _unless(stopping: Callable[[], bool], scheduler: Scheduler) -> None:
    """Play one batch; Interrupted as soon as `stopping` says so."""

    async def heard() -> None:
        while not stopping():
            await asyncio.sleep(HEARD_WITHIN)

    batch, stop = asyncio.ensure_future(scheduler.next_batch(0, version=0)), asyncio.ensure_future(heard())
    try:
        await asyncio.wait((batch, stop), return_when=asyncio.FIRST_COMPLETED)
        if not batch.done():
            raise Interrupted("stopped while random episodes were played for the recipe's tokenizer, before any step")
        batch.result()
    finally:
        for one in (batch, stop):
            one.cancel()
        await asyncio.gather(batch, stop, return_exceptions=True)


def _settings(manager: EnvManagerConfig, seed: int) -> RolloutSettings:
    return RolloutSettings(
        seed=seed,
        step_timeout=manager.step_timeout,
        reset_timeout=manager.reset_timeout,
        max_env_retries=manager.max_env_retries,
        max_env_failure_rate=manager.max_env_failure_rate,
        max_concurrent=1,
    )
