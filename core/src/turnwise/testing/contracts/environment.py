"""What every environment keeps: it is a function of seed and actions, alone in its process and the same in every other,
at whatever time, and returns what the contract names."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import threading
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from attrs import define, field

from turnwise.contracts.environment import Response, check_reset, check_step, takes_response
from turnwise.plugins import registry
from turnwise.testing.compare import changed, global_random_state, global_seed, same
from turnwise.testing.elsewhere import played_elsewhere, report_to
from turnwise.testing.later import Clocks
from turnwise.testing.subject import Subject

KIND = "environment"
STEPS = 20
SEEDS = range(8)
LARGEST_SEED = 2**32 - 1
HOUR = 3600.0
LONGEST = 1000
"""Steps after which an environment's own answers must have led to an end."""
# Nothing, a word, a number, a tagged answer: what a parser may meet.
TEXTS = ("", "a", "b", "0", "1", "yes", "left", "<answer>1</answer>")


@define
class Hand:
    """Plays one environment with random legal actions (its own, the author's, or a few texts) and writes down what it
    answered. `between`: done before every call."""

    environment: Any
    runner: asyncio.Runner
    texts: tuple[str, ...] = TEXTS
    log: list[Any] = field(factory=list)
    done: bool = False
    between: Callable[[], None] = lambda: None
    _info: dict[str, Any] = field(factory=dict)
    _draw: np.random.Generator = field(factory=np.random.default_rng)

    def call(self, value: Any) -> Any:
        async def awaited() -> Any:
            return await value

        return self.runner.run(awaited()) if inspect.isawaitable(value) else value

    def reset(self, seed: int) -> None:
        tasks = getattr(self.environment, "num_tasks", None)
        # The seed names the task too, so that equal seeds are equal episodes.
        options = {} if tasks is None else {"options": {"index": seed % tasks}}
        self.between()
        observation, self._info = check_reset(self.call(self.environment.reset(seed=seed, **options)), "environment")
        self.log, self.done = [observation, _reported(self._info)], False
        # The same choices for every seed: what differs comes from the environment.
        self._draw = np.random.default_rng(0)

    def step(self, action: str | None = None) -> float:
        """Play `action` (none: a random one), and return the reward."""
        legal = tuple(self._info.get("actions") or self.texts)
        action = legal[int(self._draw.integers(len(legal)))] if action is None else action
        self.between()
        answer = check_step(self.call(self.environment.step(action)), "environment")
        observation, reward, terminated, truncated, self._info = answer
        self.done = terminated or truncated
        self.log += [action, observation, reward, terminated, truncated, _reported(self._info)]
        return reward

    def play(self, seed: int) -> list[Any]:
        self.reset(seed)
        for _ in range(STEPS):
            if self.done:
                break
            self.step()
        return self.log

    def told(self, key: str) -> Any:
        """What the last call's `info` holds."""
        return self._info.get(key)


def _reported(info: dict[str, Any]) -> dict[str, Any]:
    return {key: info[key] for key in ("state_key", "success", "actions", "answer") if key in info}


def hand(implementation: Subject, runner: asyncio.Runner) -> Hand:
    """A player of a new environment."""
    return Hand(implementation.environment(), runner, tuple(implementation.supplied.get("actions", TEXTS)))


def test_same_seed_and_actions_give_the_same_trajectory(implementation: Subject, runner: asyncio.Runner) -> None:
    """The members of a group, and a retry, meet the same task."""
    player = hand(implementation, runner)
    first = player.play(3)
    assert same(first, player.play(3)), (
        "a second episode of the same instance differs. Fix: reset must draw everything from its seed."
    )
    assert same(first, hand(implementation, runner).play(3)), (
        "another instance differs. Fix: reset must draw everything from its seed."
    )


def test_other_seeds_differ_somewhere(implementation: Subject, runner: asyncio.Runner) -> None:
    """A run plays more than one task."""
    player = hand(implementation, runner)
    if getattr(player.environment, "num_tasks", None) == 1:
        return  # its one task may always go the same way
    logs = [player.play(seed) for seed in SEEDS]
    # Without what info reports: a state key may hold the seed itself.
    observations = [[part for part in log if not isinstance(part, dict)] for log in logs]
    assert not all(same(observations[0], other) for other in observations[1:]), (
        f"seeds 0 to {len(SEEDS) - 1} give one and the same episode. Fix: draw the task from the seed; num_tasks = 1"
        " where there is only one."
    )


@pytest.fixture(scope="module")
def elsewhere(subjects: list[Subject]) -> dict[str, dict[str, Any]]:
    """Name → `now` and `later` → the logs of the episodes of SEEDS in another process, or why there are none."""
    chosen = [s.entry.name for s in subjects if s.entry.kind == KIND and not s.entry.missing]
    return played_elsewhere(chosen)


def _logs(
    implementation: Subject, runner: asyncio.Runner, between: Callable[[], None] = lambda: None
) -> list[list[Any]]:
    player = hand(implementation, runner)
    player.between = between
    return [player.play(seed) for seed in SEEDS]


def report(path: str, clocks: Clocks) -> None:
    """What runs in the other process."""
    with asyncio.Runner() as runner:

        def now(name: str) -> list[list[Any]]:
            return _logs(Subject(registry().find(KIND, name)), runner)

        def later(name: str) -> list[list[Any]]:
            # Between two calls, where a model thinks: what an environment waits for itself is as long as ever.
            return _logs(Subject(registry().find(KIND, name)), runner, lambda: clocks.forward(HOUR))

        report_to(path, {"now": now, "later": later})


def test_another_process_plays_the_same(
    implementation: Subject, runner: asyncio.Runner, elsewhere: dict[str, dict[str, Any]]
) -> None:
    """Workers and resumed runs have the tasks of the first process."""
    here, there = _logs(implementation, runner), elsewhere[implementation.entry.name]["now"]
    assert isinstance(there, list), f"it cannot be played in a second process: {there}"
    assert same(here, there), (
        "the episode differs in another process: a run that is resumed, or one with several workers, would have other"
        " tasks. Fix: no hash() of a text and no order of a set, which every process chooses anew; hashlib, sorted()."
    )


def test_the_time_has_no_influence(implementation: Subject, elsewhere: dict[str, dict[str, Any]]) -> None:
    """An hour passes between two calls."""
    implementation.environment()  # skips what cannot be built
    now, later = (elsewhere[implementation.entry.name][way] for way in ("now", "later"))
    assert isinstance(now, list), f"it cannot be played in a second process: {now}"
    assert isinstance(later, list), f"it fails where an hour passes between two calls: {later}"
    assert same(now, later), (
        "the episode, or its rewards, are others where an hour passes between two calls: a slow or resumed run would"
        " learn something else. Fix: count steps, not seconds, and read no date."
    )


def test_the_largest_seed_is_taken(implementation: Subject, runner: asyncio.Runner) -> None:
    """Seeds are drawn from all of 32 bits."""
    hand(implementation, runner).play(LARGEST_SEED)


def test_the_process_global_random_state_is_left_untouched(implementation: Subject, runner: asyncio.Runner) -> None:
    """Others may draw from it."""
    before = global_random_state()

    def untouched(what: str) -> None:
        moved = changed(before, global_random_state())
        assert not moved, (
            f"{what} changed the global state of {', '.join(moved)}. Fix: draw from np.random.default_rng(seed) or"
            " random.Random(seed), made in reset."
        )

    player = hand(implementation, runner)
    untouched("the constructor")
    for seed in SEEDS:
        player.reset(seed)
        untouched("reset")
        player.play(seed)
        untouched("step")


def test_the_process_global_random_state_has_no_influence(implementation: Subject, runner: asyncio.Runner) -> None:
    """Others do draw from it."""
    player = hand(implementation, runner)
    with global_seed(1):
        first = player.play(5)
    with global_seed(2):
        second = player.play(5)
    assert same(first, second), (
        "the episode depends on the global random state. Fix: draw from a generator made in reset."
    )


def test_two_instances_do_not_disturb_each_other(implementation: Subject, runner: asyncio.Runner) -> None:
    """The episodes of a batch are played at the same time."""
    # Two tasks, and one: what the members of a group share may be written into.
    for seeds in ((1, 2), (1, 1)):
        alone = [hand(implementation, runner).play(seed) for seed in seeds]
        players = [hand(implementation, runner) for _ in seeds]
        for player, seed in zip(players, seeds):
            player.reset(seed)
        for _ in range(STEPS):
            for player in players:
                if not player.done:
                    player.step()
        assert all(same(log, player.log) for log, player in zip(alone, players)), (
            "an episode changes when another instance plays at the same time. Fix: keep no state in the class or"
            " module, and write into nothing that instances share, such as a cached task."
        )


def test_it_plays_the_same_in_another_thread(implementation: Subject, runner: asyncio.Runner) -> None:
    """Where steps run by default."""
    player = hand(implementation, runner)
    if inspect.iscoroutinefunction(player.environment.step):
        return  # coroutines run in the driver's own thread
    here, there = player.play(4), []
    thread = threading.Thread(target=lambda: there.append(player.play(4)))
    thread.start()
    thread.join()
    assert there, "the episode raised in another thread; steps run in threads by default."
    assert same(here, there[0]), "the episode differs in another thread; steps run in threads by default."


def test_it_pickles(implementation: Subject, runner: asyncio.Runner) -> None:
    """For `step: process`, and workers elsewhere."""
    environment = implementation.environment()
    copy = pickle.loads(pickle.dumps(environment))
    texts = tuple(implementation.supplied.get("actions", TEXTS))
    assert same(Hand(environment, runner, texts).play(6), Hand(copy, runner, texts).play(6)), (
        "the unpickled environment plays another episode."
    )


def test_values_are_finite_and_of_the_types_of_the_contract(implementation: Subject, runner: asyncio.Runner) -> None:
    """Observations, rewards, ends."""
    player = hand(implementation, runner)
    for seed in SEEDS:
        player.play(seed)  # observations and rewards are checked on the way
        check_images(player.log)


def test_info_holds_what_the_contract_names(implementation: Subject, runner: asyncio.Runner) -> None:
    """Of the types that those who read it expect."""
    player = hand(implementation, runner)
    player.reset(0)
    infos = [player._info]
    while not player.done and len(infos) < STEPS:
        player.step()
        infos.append(player._info)
    for info in infos:
        key = info.get("state_key")
        assert isinstance(key, Hashable | np.ndarray), f"info['state_key'] is {key!r}; it must be hashable or an array."
        assert isinstance(info.get("success", False), bool | np.bool_), (
            f"info['success'] is {info['success']!r}; it must be a bool."
        )
        metrics = info.get("metrics", {})
        assert all(isinstance(n, str) and math.isfinite(v) for n, v in metrics.items()), (
            f"info['metrics'] is {metrics!r}; it maps names to finite numbers."
        )
        assert all(isinstance(a, str) for a in info.get("actions", ())), (
            f"info['actions'] is {info['actions']!r}; it must hold texts."
        )
        assert isinstance(info.get("answer", ""), str), f"info['answer'] is {info['answer']!r}; it must be a text."


def test_its_own_answers_are_right(implementation: Subject, runner: asyncio.Runner) -> None:
    """What `info` calls the answer is rewarded."""
    player = hand(implementation, runner)
    for seed in SEEDS:
        player.reset(seed)
        said: list[str] = []
        score = 0.0
        while not player.done and isinstance(answer := player.told("answer"), str):
            assert len(said) < LONGEST, f"seed {seed}: {LONGEST} of its own answers have not ended the episode."
            said.append(answer)
            score += player.step(answer)
        success = player.told("success")
        right = score > 0 if success is None else bool(success) and score != 0
        assert right or not said, (
            f"seed {seed}: its own answers {said!r:.200} score {score:g}, success {success}: nothing that a model says"
            " could be right. Fix: the verifier, or info['answer'], in the form in which the verifier takes it."
        )


def test_an_empty_action_is_answered(implementation: Subject, runner: asyncio.Runner) -> None:
    """The action of a response in which none was found."""
    player = hand(implementation, runner)
    player.reset(0)
    # '' is what the manager sends when it found no action.
    check_step(player.call(player.environment.step("")), "environment")


def test_an_environment_that_takes_the_response_plays_with_and_without_it(
    implementation: Subject, runner: asyncio.Runner
) -> None:
    """A manager may have none to give."""
    player = hand(implementation, runner)
    if not takes_response(player.environment):
        return  # it reads the action alone
    for whole in (
        {"response": None},
        {"response": Response("<think>no</think>", "length", 4)},
        {"response": Response("", "stop")},
        {},
    ):
        player.reset(0)
        try:
            answer = player.call(player.environment.step("", **whole))
        except (TypeError, AttributeError) as error:
            raise AssertionError(
                f"step fails with {whole or 'no response'}: {error}. Fix: def step(self, action, response=None)."
            ) from error
        check_step(answer, "environment")


def check_images(log: list[Any]) -> None:
    """The images among the observations of a log are images."""
    for observation in (part for part in log if isinstance(part, list)):
        for part in observation:
            image = part.get("image")
            assert image is None or is_image(image), (
                f"an observation holds the image {image!r:.60}; it must be a uint8 array H×W×3."
            )


def is_image(value: Any) -> bool:
    """Whether it is a uint8 array [H, W, 3]."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def test_it_renders(implementation: Subject, runner: asyncio.Runner) -> None:
    """A text or a picture, where there is `render`."""
    player = hand(implementation, runner)
    if not hasattr(player.environment, "render"):
        return  # it need not
    player.reset(0)
    frame = player.call(player.environment.render())
    assert isinstance(frame, str) or is_image(frame), (
        f"render returned {frame!r:.60}; it must be a string or a uint8 array H×W×3."
    )


def test_it_closes_twice(implementation: Subject, runner: asyncio.Runner) -> None:
    """After a failure nobody knows whether it was closed."""
    player = hand(implementation, runner)
    player.play(0)
    for _ in range(2 if hasattr(player.environment, "close") else 0):
        player.call(player.environment.close())
