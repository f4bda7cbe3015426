"""The options of the estimators; top-level keys of the same names reach them."""

from __future__ import annotations

from attrs import field, frozen, validators

from turnwise.data.normalise import RewardNormalization


@frozen
class ScoreConfig:
    """Options of the estimators that give a trajectory one value: `grpo`, `rloo`, `reinforce_plus_plus_baseline`.

    `reward_normalization`: how scores are normalised first. None: `mean_std` in `traj_group_id` for grpo, `identity` for the others.
    """

    reward_normalization: RewardNormalization | None = None


@frozen
class ReturnConfig:
    """Options of the estimators that discount over tokens: `reinforce`, `reinforce_plus_plus`.

    `gamma`: the discount per sampled token, in [0, 1]. `reward_normalization`: as in `ScoreConfig`, applied to token rewards; None: `identity`.
    """

    gamma: float = field(default=1.0, validator=[validators.ge(0.0), validators.le(1.0)])
    reward_normalization: RewardNormalization | None = None
