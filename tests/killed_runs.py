"""Asynchronous runs that are killed at random moments: `python tests/killed_runs.py [KILLS] [SEED]` kills that many
times in each `weight_update` and prints what should not be.

A run of the fakes, slowed by small sleeps, gets SIGKILL after a random part of its length and is resumed, and now and
then killed again, until its end. In `between_batches` it must then be, bit for bit, the run that was not killed; else
every episode must have been trained once, with tokens as young as the bound says."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.cli.main import main
from turnwise.pipeline import local, queued  # imported here, and not in each process that is forked
from turnwise.plugins import reset_registry
from turnwise.testing.fakes import FakeBackend, FakeStrategy
from turnwise.testing.runs import COUNTING, FAKES, UNTIMED, written

assert local

STEPS, GROUPS, SIZE = 6, 2, 4
WAYS = ("between_batches", "between_turns", "between_tokens")
SECONDS = 120
"""What one run may take, on a machine that does other things as well."""
AGAIN = 0.4
CONFIG = {
    **COUNTING,
    "max_steps": STEPS,
    "eval_steps": 2,
    "save_steps": 1,
    "rollout_batch_size": GROUPS * SIZE,
    "actor_infer.strategy_args.strategy_config": {"delay": 0.06},
    "train_env_manager": {"num_env_groups": GROUPS, "group_size": SIZE, "tags": ["Count"]},
}
PHASES = {
    "playing": "turnwise.rollout.worker:LocalExecutor.play",
    "training": "turnwise.testing.fake_model:FakeStrategy.update",
    "waiting to publish": "turnwise.rollout:Scheduler.settled",
    "publishing": "turnwise.testing.fake_model:FakeBackend.receive",
    "evaluating": "turnwise.rollout:Scheduler.evaluate",
    "saving": "turnwise.pipeline.saving:Saving.save",
    "writing the queue": "turnwise.pipeline.queued:write",
    "logging": "turnwise.pipeline.loop:Loop._log",
}


def _alone(folder: Path) -> None:
    """Nothing."""


@frozen
class Target:
    """What is killed: runs of one `weight_update`, and of `overrides`. `phases`: what the driver can be at. `prepared`:
    makes a run's folder ready. `began`: in the driver, before anything. `ended`: ends what a killed driver leaves.
    `seconds`: what one run may take. `started`: kills come after its first phase has begun. `again`: how often a resumed
    run is killed, too."""

    way: str
    name: str
    overrides: tuple[str, ...] = ()
    phases: Mapping[str, str] = PHASES
    prepared: Callable[[Path], None] = _alone
    began: Callable[[Path], None] = _alone
    ended: Callable[[Path], None] = _alone
    seconds: int = SECONDS
    started: bool = False
    again: float = AGAIN

    def settings(self, ratio: int) -> list[str]:
        """The overrides of a run."""
        return [f"weight_update={self.way}", f"async_generation_ratio={ratio}", *self.overrides]


@frozen
class Killed:
    """What became of one run: how often it was killed, in which phases, and what should not be."""

    kills: int
    phases: Counter[str]
    replayed: int
    faults: list[str]


# ---------------------------------------------------------------- in the process that is killed


def _counted(owner: Any, name: str, change: Callable[[int], None]) -> None:
    original = getattr(owner, name)
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def around(*args: Any, **options: Any) -> Any:
            change(1)
            try:
                return await original(*args, **options)
            finally:
                change(-1)
    else:

        @functools.wraps(original)
        def around(*args: Any, **options: Any) -> Any:
            change(1)
            try:
                return original(*args, **options)
            finally:
                change(-1)

    setattr(owner, name, around)


def _slow(owner: Any, name: str, seconds: float) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **options)

    setattr(owner, name, slow)


def _slow_receive() -> None:
    original = FakeBackend.receive

    async def receive(self: FakeBackend, offer: Any) -> int:
        await asyncio.sleep(0.04)
        return await original(self, offer)

    FakeBackend.receive = receive  # type: ignore[method-assign]


def _slowly(folder: Path) -> None:
    """Every phase takes long enough to be hit."""
    _slow_receive()
    for name, seconds in (("update", 0.03), ("save", 0.05)):
        _slow(FakeStrategy, name, seconds)


def _child(folder: Path, arguments: list[str], board: mmap.mmap, target: Target) -> None:
    """The command line in a forked process, which notes in `board` how many calls are within each phase."""
    os.chdir(folder)
    with open("log.txt", "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    target.began(folder)
    _slow(queued, "write", 0.03)
    for number, place in enumerate(target.phases.values()):
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))

        def change(by: int, number: int = number) -> None:
            board[number] += by

        _counted(owner, name, change)
    sys.argv = ["turnwise", "train", "run.yaml", *arguments]
    main()


@frozen
class Ended:
    """Exit code of a run (negative: the signal), the phases in which it was at its end, its seconds, and how long of
    these it was at any phase, from the first to the last."""

    code: int
    phases: list[str]
    seconds: float
    at_work: float


def run(target: Target, folder: Path, arguments: list[str], after: float | None) -> Ended:
    """One run. `after`: when it gets SIGKILL, in seconds since its first phase began where `target.started`."""
    board = mmap.mmap(-1, len(target.phases))
    began = time.monotonic()
    first = last = began if not target.started else 0.0
    child = os.fork()
    if child == 0:
        code = 70
        try:
            _child(folder, arguments, board, target)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        finally:
            os._exit(code)
    signalled, limit = False, began + target.seconds
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        now = time.monotonic()
        if any(board[:]):
            first, last = first or now, now
        due = after is not None and first and now >= first + after
        if not signalled and (due or now >= limit):
            os.kill(child, signal.SIGKILL)
            signalled = True
        time.sleep(0.002)
    seconds = time.monotonic() - began
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    target.ended(folder)
    return Ended(status, [name for number, name in enumerate(target.phases) if board[number]], seconds, last - first)


# ---------------------------------------------------------------- what a run left


def _metrics(folder: Path, timed: bool = False) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return lines if timed else [{k: v for k, v in line.items() if not k.startswith(UNTIMED)} for line in lines]


def _differences(folder: Path, whole: Path) -> list[str]:
    """In what a run is not, bit for bit, the one that was not killed."""
    faults = []
    mine, theirs = _metrics(folder), _metrics(whole)
    if len(mine) != len(theirs):
        faults.append(f"metrics of {len(mine)} steps, not {len(theirs)}")
    for one, other in zip(mine, theirs, strict=False):
        odd = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        if odd:
            faults.append(f"metrics of step {other['step']}: {', '.join(odd)}")
    last = f"out/checkpoints/checkpoint-{STEPS:06d}"
    for name in (
        "out/trajectories/train.jsonl",
        "out/trajectories/val.jsonl",
        f"{last}/model/weights.npy",
        f"{last}/actor_train/state.npz",
    ):
        if (folder / name).read_bytes() != (whole / name).read_bytes():
            faults.append(f"{name} differs")
    return faults


def _lost(folder: Path, ratio: int) -> list[str]:
    """Episodes that were not trained once, and tokens older than the bound."""
    faults = []
    trained = Counter(
        (one["step"], one["group"], one["member"])
        for one in map(json.loads, (folder / "out/trajectories/train.jsonl").read_text().splitlines())
    )
    due = {(step, step * GROUPS + s, m) for step in range(STEPS) for s in range(GROUPS) for m in range(SIZE)}
    for place in sorted(due ^ trained.keys()):
        faults.append(f"step, group, member {place}: {'never trained' if place in due else 'trained, and not due'}")
    faults += [f"step, group, member {place}: trained {n} times" for place, n in trained.items() if n > 1]
    lines = _metrics(folder)
    if [line["step"] for line in lines] != list(range(STEPS + 1)):
        faults.append(f"metrics of the steps {[line['step'] for line in lines]}")
    for line in lines:
        if line.get("async/staleness/max", 0) > ratio or line.get("val/version_span", 0):
            faults.append(
                f"step {line['step']}: staleness {line.get('async/staleness/max')}, bound {ratio}, versions of an"
                f" evaluation {line.get('val/version_span')}"
            )
        if line.get("rollout/attempts", GROUPS * SIZE) != GROUPS * SIZE:
            faults.append(f"step {line['step']}: {line['rollout/attempts']} attempts")
    return faults


def faults_of(folder: Path, whole: Path, target: Target, ratio: int) -> list[str]:
    """What should not be, of a run that came to its end."""
    left = sorted(path.name for path in (folder / "out/checkpoints").iterdir())
    faults = (
        []
        if left == (kept := sorted(p.name for p in (whole / "out/checkpoints").iterdir()))
        else [f"checkpoints {left}, not {kept}"]
    )
    return faults + (_differences(folder, whole) if target.way == "between_batches" else []) + _lost(folder, ratio)


def _prepared(target: Target, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(written(FAKES, CONFIG), encoding="utf-8")
    target.prepared(folder)


def play(target: Target, folder: Path, ratio: int) -> Ended:
    """A run that is not killed."""
    _prepared(target, folder)
    whole = run(target, folder, target.settings(ratio), None)
    assert whole.code == 0, (folder / "log.txt").read_text()
    return whole


def killed(target: Target, folder: Path, whole: Path, ratio: int, unhurt: Ended, rng: random.Random) -> Killed:
    """Kill a run once at least, resume it until its end, and judge what it left."""
    _prepared(target, folder)
    kills, phases, again = 0, Counter[str](), True
    while True:
        resume = [] if kills == 0 else ["resume_from_checkpoint=true"]
        after = rng.uniform(0, unhurt.at_work if target.started else unhurt.seconds) if again else None
        end = run(target, folder, target.settings(ratio) + resume, after)
        code = end.code
        if code == -signal.SIGKILL and end.seconds < target.seconds:
            kills += 1
            phases.update(end.phases or ["between them"])
            again = rng.random() < target.again
            continue
        if code != 0:
            told = (folder / "log.txt").read_text()[-2000:]
            return Killed(kills, phases, 0, [f"{'hang' if code < 0 else f'exit {code}'}: {told}"])
        replays = [line.get("resume/replayed", 0) for line in _metrics(folder, timed=True)]
        return Killed(kills, phases, int(max(replays)), faults_of(folder, whole, target, ratio))


def attack(target: Target, count: int, seed: int, work: Path) -> tuple[list[Killed], list[str]]:
    """Runs of r = 1 and 2 in turn, until `count` kills hit; and the faults, each with its run."""
    way, rng = target.name, random.Random(f"{seed}:{target.name}")
    unhurt = {ratio: play(target, work / f"whole-{ratio}", ratio) for ratio in (1, 2)}
    runs: list[Killed] = []
    faults: list[str] = []
    while sum(one.kills for one in runs) < count:
        ratio = 1 + len(runs) % 2
        one = killed(target, work / f"run-{len(runs)}", work / f"whole-{ratio}", ratio, unhurt[ratio], rng)
        faults += [f"{way}, r = {ratio}, run {len(runs)}, killed {one.kills} times: {fault}" for fault in one.faults]
        runs.append(one)
        print(
            f"{way}: {sum(one.kills for one in runs)} kills in {len(runs)} runs, {len(faults)} faults",
            file=sys.stderr,
            flush=True,
        )
    return runs, faults


def by_hand(targets: Iterable[Target], count: int = 50, seed: int = 0) -> int:
    """Kill `count` times in each way, print every fault and a line for each way; how many faults."""
    found = 0
    for target in targets:
        reset_registry()
        with tempfile.TemporaryDirectory() as folder:
            runs, faults = attack(target, count, seed, Path(folder))
        for fault in faults:
            print(fault)
        phases = sum((one.phases for one in runs), Counter[str]())
        print(
            f"{target.name}: {sum(one.kills for one in runs)} kills in {len(runs)} runs, {sum(bool(r.faults) for r in runs)}"
            f" runs with faults, {sum(one.replayed for one in runs)} episodes replayed; killed while",
            ", ".join(f"{name} {n}" for name, n in phases.most_common()),
            flush=True,
        )
        found += len(faults)
    return found


if __name__ == "__main__":
    sys.exit(1 if by_hand([Target(way, way, began=_slowly) for way in WAYS], *map(int, sys.argv[1:3])) else 0)
