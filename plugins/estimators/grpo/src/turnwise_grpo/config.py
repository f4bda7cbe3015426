"""The options of the estimators; top-level keys of the same names reach them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import field, frozen, validators

from turnwise.data.normalise import RewardNormalization
from turnwise.errors import Problem


@frozen
class ScoreConfig:
    """Options of the estimators that give a trajectory one value: `grpo`, `rloo`, `reinforce_plus_plus_baseline`.

    `reward_normalization`: how scores are normalised first. None: `mean_std` in `traj_group_id` for grpo, `identity`
    for the others.
    """

    reward_normalization: RewardNormalization | None = None


@frozen
class ReturnConfig:
    """Options of the estimators of token rewards: `reinforce`, `reinforce_plus_plus`, `agentic_reinforce`.

    `gamma`: the discount per sampled token (`agentic_reinforce`: per segment), in [0, 1].
    `reward_normalization`: as in `ScoreConfig`, applied to token rewards; None: `identity`.
    """

    gamma: float = field(default=1.0, validator=[validators.ge(0.0), validators.le(1.0)])
    reward_normalization: RewardNormalization | None = None


@frozen
class StepConfig:
    """Options of `step_reinforce`.

    `step_reward_gamma`: the discount per turn, in [0, 1]. `reward_normalization`: how the turns' returns are
    normalised, over turns; None:
    `mean` in `traj_group_id`.
    """

    step_reward_gamma: float = field(default=0.95, validator=[validators.ge(0.0), validators.le(1.0)])
    reward_normalization: RewardNormalization | None = None

    def check(self, run: Any) -> Iterator[Problem]:
        """`gamma` discounts tokens, which this estimator does not; without a KL penalty in the reward nothing reads
        it."""
        # gamma discounts the KL penalty in the reward, token by token, beside this estimator's turns.
        if run.gamma != 1.0 and run.init_kl_coef == 0:
            yield Problem(
                "step_reward_gamma",
                f"{self.step_reward_gamma} is the discount from turn to turn, not gamma {run.gamma}",
                warning=True,
            )
