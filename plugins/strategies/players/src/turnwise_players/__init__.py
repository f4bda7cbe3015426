"""Hooks of turnwise-players: the random player and the human at the keyboard."""

from turnwise import Implementation, hookimpl


@hookimpl
def inference_backends() -> list[Implementation]:
    """Players that need no model: for evaluation and rollout, refused by `train`."""
    return [
        Implementation(
            "random",
            "turnwise_players.random_player:RandomPlayer",
            fixtures="turnwise_players.fixtures:random_fixture",
            summary="plays uniformly among the legal actions that the environment gives",
        ),
        Implementation(
            "human",
            "turnwise_players.human_player:HumanPlayer",
            config="turnwise_players.config:HumanConfig",
            fixtures="turnwise_players.fixtures:human_fixture",
            summary="shows the conversation in the terminal and reads the answer from the keyboard",
        ),
    ]
