"""Faults of every kind at a fifth each, in asynchronous runs: groups stay whole, nothing is scored by accident, and a
run ends well or in one line."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

FAULTY = """\
import asyncio, os, random, time
from pathlib import Path
from turnwise import Implementation, hookimpl
from turnwise.testing.fakes import FakeBackend, FakeEnvironment, FakeEnvManager

drawn = random.Random(1)

def turn_of_all():
    # Counted in a file, for a process that dies takes its count along.
    with Path("turns").open("ab") as file:
        file.write(b".")
        return file.tell()

class Faulty(FakeEnvironment):
    # Every turn is worth 1 and a share of 1: what was cut short, or scored without being played, is worth less than 3.
    def __init__(self, kinds=(), apart=False):
        super().__init__()
        self.kinds, self.apart = kinds, apart
    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self._turn == 2:
            # One draw, so that each kind comes in a fifth of the episodes.
            number = turn_of_all() % 5 if self.apart else drawn.randrange(5)
            kind = self.kinds[number] if number < len(self.kinds) else ""
            if kind == "raise":
                raise RuntimeError("the game is broken")
            if kind == "hang":
                time.sleep(1)
            if kind == "nan":
                reward = float("nan")
            if kind == "die":
                os._exit(3)
        return observation, 1 + reward, *rest

class Losing(FakeBackend):
    async def generate(self, request):
        if self._version >= 2 and drawn.random() < 0.2:
            await asyncio.Event().wait()
        return await super().generate(request)

class Odd(BaseException):
    pass

class Ending(FakeEnvManager):
    async def run(self, episode, sampler):
        played = await super().run(episode, sampler)
        if episode.group >= 6 and drawn.random() < 0.2:
            raise Odd("out of order")
        return played

@hookimpl
def environments():
    return [Implementation("faulty", Faulty)]

@hookimpl
def inference_backends():
    return [Implementation("losing", Losing, config="turnwise.testing.fakes:FakeBackendConfig")]

@hookimpl
def env_managers():
    return [Implementation("ending", Ending)]
"""

AHEAD = ["plugins=[turnwise.testing.plugin, ./mine.py]", "async_generation_ratio=1"]
MANAGER = "{env_type: faulty, env_manager: fake_manager, max_steps: 3"
PATIENT = [
    *("train_env_manager.step_timeout=0.2", "train_env_manager.max_env_retries=40"),
    *("train_env_manager.max_env_failure_rate=0.95", "eval_steps=0", "eval_at_end=false"),
]


@pytest.mark.parametrize("way", ["between_batches", "between_turns", "between_tokens"])
def test_environments_that_fail_in_every_way_leave_whole_groups(fake: Any, way: str) -> None:
    (fake.folder / "mine.py").write_text(FAULTY)
    apart = way == "between_tokens"  # once: each death costs an interpreter
    other = (
        f"Apart: {MANAGER}, step: process, env_config: {{kinds: [die], apart: true}}}}"
        if apart
        else f"Apart: {MANAGER}, step: inline, env_config: {{kinds: [nan, raise]}}}}"
    )
    fake.train(
        *AHEAD,
        *PATIENT,
        f"weight_update={way}",
        "actor_infer.strategy_args.strategy_config={delay: 0.01}",
        f"custom_envs={{Count: {MANAGER}, step: thread, env_config: {{kinds: [raise, hang, nan]}}}}, {other}}}",
        "train_env_manager.tags=[Count, Apart]",
        "val_env_manager.tags=[Count]",
    )
    lines = fake.metrics()
    assert all(line["async/staleness/max"] <= 1 for line in lines)
    told = sum(line["rollout/env_failures"] for line in lines)
    assert told > 10
    assert told == sum(line["rollout/retries"] for line in lines)
    assert sum(line["rollout/env_timeouts"] for line in lines) > 0
    log = (fake.folder / "out" / "run.log").read_text()
    kinds = [
        "the game is broken",
        "step_timeout",
        "the reward nan",
        *(["process dead, with exit code 3"] if apart else []),
    ]
    assert [kind for kind in kinds if kind not in log] == []
    assert {line["rollout/dropped_members"] for line in lines} == {0}
    played = [json.loads(line) for line in fake.trajectories("train").splitlines()]
    assert Counter((one["step"], one["group"], one["member"]) for one in played) == Counter(
        (step, 2 * step + slot, member) for step in range(6) for slot in range(2) for member in range(4)
    )
    assert all(3 <= one["score"] <= 6 for one in played)


@pytest.mark.parametrize("way", ["between_batches", "between_turns", "between_tokens"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["actor_infer.strategy_args.strategy_name=losing", "actor_infer.request_timeout=0.5"],
            "within request_timeout: 0.5 s",
        ),
        (["custom_envs.Count.env_manager=ending"], "the episode ended by Odd: out of order"),
    ],
)
def test_lost_requests_and_ended_episodes_end_a_run_in_one_line(
    fake: Any, way: str, settings: list[str], told: str
) -> None:
    (fake.folder / "mine.py").write_text(FAULTY)
    got = fake.command("train", "run.yaml", *AHEAD, f"weight_update={way}", *settings)
    assert got.exit_code == 1, got.output
    (line,) = (line for line in got.stderr.splitlines() if line.startswith("error: "))
    assert told in line
    assert "Fix: " in line
    assert got.stderr.splitlines()[-1].startswith("resume: ")
    whole = [AHEAD[1], f"weight_update={way}", "resume_from_checkpoint=true"]
    fake.train(*whole)
    assert {line["step"] for line in fake.metrics()} == set(range(7))
