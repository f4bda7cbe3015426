"""The players answer by seed, by keyboard, or with one clear line."""

from __future__ import annotations

import asyncio
import io
import threading

import numpy as np
import pytest

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, TurnwiseError
from turnwise_players.config import HumanConfig
from turnwise_players.fixtures import human_fixture, random_fixture
from turnwise_players.human_player import HumanPlayer, PlayerLeft, render
from turnwise_players.random_player import RandomPlayer

CONTEXT = InferenceContext(None, None)
ACTIONS = ("Left", "Down", "Right", "Up")


def ask(seed: int, actions: tuple[str, ...] = ACTIONS, content: object = "Where to?") -> Request:
    messages = (
        {"role": "system", "content": "You walk."},
        {"role": "user", "content": "old"},
        {"role": "user", "content": content},
    )
    return Request(seed, GeneratingArgs(), 8, messages=messages, actions=actions, tag="Lake")


def play(player: RandomPlayer | HumanPlayer, *requests: Request) -> list[Generation]:
    async def main() -> list[Generation]:
        return [await player.generate(request) for request in requests]

    return asyncio.run(main())


def test_the_random_player_repeats_itself_by_seed_and_reaches_every_action_evenly() -> None:
    player = RandomPlayer(None, CONTEXT)
    texts = [generation.text for generation in play(player, *map(ask, range(-200, 1800)))]
    assert texts == [generation.text for generation in play(player, *map(ask, range(-200, 1800)))]
    counts = [texts.count(action) for action in ACTIONS]
    assert sum(counts) == 2000
    assert all(abs(count - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75) for count in counts)


def test_the_random_players_answer_is_a_legal_action_without_ids() -> None:
    (generation,) = play(RandomPlayer(None, CONTEXT), ask(3, ("Stay",)))
    assert generation.text == "Stay"
    assert (generation.ids, generation.logprobs, generation.versions, generation.finish) == (None, None, None, "stop")
    assert generation.extras == {"action": "Stay"}


def test_without_legal_actions_the_random_player_says_what_to_do() -> None:
    with pytest.raises(
        EngineError, match=r"environment of Lake gave none\. Fix: put the legal texts into info\['actions'\]"
    ):
        play(RandomPlayer(None, CONTEXT), ask(0, ()))


def test_players_take_messages_and_no_weights() -> None:
    player = RandomPlayer(None, CONTEXT)
    assert (player.input, player.transports(None, CONTEXT)) == ("messages", ())

    async def main() -> None:
        player.live(3)
        for step in (
            player.pause(),
            player.resume(),
            player.abort(ask(0)),
            player.sleep(),
            player.wake("weights"),
            player.close(),
            player.close(),
        ):
            await step
        await player.receive(Offer("shared", 4))

    with pytest.raises(EngineError, match="has no weights, so it cannot receive version 4"):
        asyncio.run(main())


def test_the_human_sees_the_last_messages_and_the_typed_line_is_the_answer() -> None:
    screen = io.StringIO()
    player = HumanPlayer(HumanConfig(show=1), CONTEXT, io.StringIO("go left\n"), screen)
    (generation,) = play(player, ask(0))
    assert generation.text == "go left"
    assert generation.extras == {"action": "go left"}
    shown = screen.getvalue()
    assert "Lake" in shown
    assert "[user]\nWhere to?" in shown
    assert "old" not in shown
    assert "actions: Left, Down, Right, Up · q leaves" in shown


def test_an_image_is_shown_as_its_size() -> None:
    parts = [{"type": "text", "text": "See "}, {"type": "image", "image": np.zeros((4, 6, 3), np.uint8)}]
    assert "[user]\nSee [image 4×6]" in render(ask(0, content=parts), show=1)


@pytest.mark.parametrize("keyboard", ["q\n", ""])
def test_q_and_the_end_of_the_input_end_the_game_for_every_episode(keyboard: str) -> None:
    player = HumanPlayer(HumanConfig(), CONTEXT, io.StringIO(keyboard + "Left\n" if keyboard else ""), io.StringIO())
    for _ in range(2):
        with pytest.raises(PlayerLeft, match=r"^the human player left the game$") as caught:
            play(player, ask(0))
        assert isinstance(caught.value, TurnwiseError)


def test_two_episodes_are_asked_one_after_the_other() -> None:
    screen = io.StringIO()
    player = HumanPlayer(HumanConfig(), CONTEXT, io.StringIO("a\nb\n"), screen)

    async def main() -> list[Generation]:
        return list(await asyncio.gather(player.generate(ask(0)), player.generate(ask(1))))

    assert [generation.text for generation in asyncio.run(main())] == ["a", "b"]
    assert screen.getvalue().count("> ") == 2


def test_a_terminal_that_cannot_be_read_is_one_line() -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.raises(TurnwiseError, match="cannot read the human player's answer"):
        play(HumanPlayer(HumanConfig(), CONTEXT, closed, io.StringIO()), ask(0))


def test_a_line_that_comes_when_the_run_has_just_ended_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread at the keyboard finds the loop open, and it closes before the line is handed over."""
    typed, raised = threading.Event(), list[object]()
    monkeypatch.setattr(threading, "excepthook", raised.append)

    class Keyboard(io.StringIO):
        def readline(self, size: int = -1) -> str:
            typed.wait(10)
            return "Left\n"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        closed = loop.is_closed

        def open_there() -> bool:
            return threading.current_thread().name != "human-player" and closed()

        monkeypatch.setattr(loop, "is_closed", open_there)
        player = HumanPlayer(HumanConfig(), CONTEXT, Keyboard(), io.StringIO())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(player.generate(ask(0)), 0.05)

    asyncio.run(main())
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "human-player")
    typed.set()
    thread.join(10)
    assert not thread.is_alive() and raised == []


def test_the_fixtures_play() -> None:
    fixture = random_fixture()
    (generation,) = play(RandomPlayer(fixture["config"], fixture["context"]), fixture["request"](5))
    assert generation.text in ACTIONS
    fixture = human_fixture()
    assert play(fixture["backend"], fixture["request"](5))[0].text == "Left"
