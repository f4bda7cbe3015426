"""The options of `gigpo`; top-level keys of the same names reach it."""

from __future__ import annotations

from attrs import field, frozen, validators

from turnwise.data.normalise import RewardNormalization


@frozen
class GigpoConfig:
    """Options of `gigpo`.

    `episode_reward_weight`, `step_reward_weight`: w_E and w_S of A = w_E·A_E + w_S·A_S. `step_reward_gamma`: the
    discount per turn, in [0, 1].
    `similarity_threshold`: None, only equal states form an anchor group; a number in (0, 1], texts of at least this
    difflib ratio do too.
    `reward_normalization`: None: `mean_std` in `traj_group_id`. Its method (`mean_std` or `mean`) serves both levels;
    its grouping and its count serve A_E alone.
    """

    episode_reward_weight: float = field(default=1.0)
    step_reward_weight: float = field(default=1.0)
    step_reward_gamma: float = field(default=0.95, validator=[validators.ge(0.0), validators.le(1.0)])
    similarity_threshold: float | None = field(
        default=None, validator=validators.optional([validators.gt(0.0), validators.le(1.0)])
    )
    reward_normalization: RewardNormalization | None = None
