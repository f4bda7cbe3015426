"""Hooks of turnwise-grpo: group-relative and REINFORCE-family advantage estimators."""

from turnwise import Implementation, hookimpl


@hookimpl
def advantage_estimators() -> list[Implementation]:
    """Seven estimators, each a page."""
    return [
        Implementation(
            "grpo",
            "turnwise_grpo.grpo:Grpo",
            config="turnwise_grpo.config:ScoreConfig",
            summary="the score normalised in its group, on every sampled token",
        ),
        Implementation(
            "reinforce",
            "turnwise_grpo.reinforce:Reinforce",
            config="turnwise_grpo.config:ReturnConfig",
            summary="discounted returns over the trajectory's sampled tokens",
        ),
        Implementation(
            "rloo",
            "turnwise_grpo.rloo:Rloo",
            config="turnwise_grpo.config:ScoreConfig",
            summary="the score minus the mean of the others in its group",
        ),
        Implementation(
            "reinforce_plus_plus",
            "turnwise_grpo.reinforce_plus_plus:ReinforcePlusPlus",
            config="turnwise_grpo.config:ReturnConfig",
            summary="discounted returns, whitened over the step",
        ),
        Implementation(
            "reinforce_plus_plus_baseline",
            "turnwise_grpo.reinforce_plus_plus_baseline:ReinforcePlusPlusBaseline",
            config="turnwise_grpo.config:ScoreConfig",
            summary="the score minus its group's mean, whitened over the step",
        ),
        Implementation(
            "step_reinforce",
            "turnwise_grpo.step_reinforce:StepReinforce",
            config="turnwise_grpo.config:StepConfig",
            summary="each turn's discounted return, normalised over turns",
        ),
        Implementation(
            "agentic_reinforce",
            "turnwise_grpo.agentic_reinforce:AgenticReinforce",
            config="turnwise_grpo.config:ReturnConfig",
            summary="each turn's token rewards and the discounted return of the next turn",
        ),
    ]
