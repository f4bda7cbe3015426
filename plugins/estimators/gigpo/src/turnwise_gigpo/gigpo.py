"""GiGPO: the episode's advantage in its group and the turn's among turns from the same state (Feng et al. 2025, arXiv
2505.10978)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorCapabilities, EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import Method, RewardNormalization, normalise, normalise_scores, settle
from turnwise.data.ops import discounted_sums, trains, trajectories_to_tokens, turns_to_tokens
from turnwise.errors import ConfigError
from turnwise_gigpo.anchors import anchor_groups
from turnwise_gigpo.config import GigpoConfig


class Gigpo:
    """A = w_E·A_E + w_S·A_S.

    A_E: the score normalised in its trajectory group, each trajectory once (Eq. 3), on all of the trajectory's sampled
    tokens.
    A_S: R_t = r_t + γ·R_{t+1} over turns, normalised in its anchor group: the turns of the same trajectory group that
    began in an equal state on the turn's sampled tokens. Every visit counts, also two of one trajectory, also a turn
    without sampled tokens; an anchor group of one gives 0.
    """

    capabilities = EstimatorCapabilities(compares_in_groups=True)
    token_rewards: bool = False
    whiten: bool = False

    def __init__(self, config: GigpoConfig, context: EstimatorContext) -> None:
        self.config = config
        self.normalization = settle(config.reward_normalization, method="mean_std")
        self.step_method = _step_method(self.normalization)

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the returns are the advantages. Raises ValueError for a state that cannot
        be compared."""
        config, owner = self.config, batch.turns["trajectory"]
        episode = normalise_scores(batch, self.normalization)
        # Over turns and not over tokens: a state is compared by what follows from it.
        returns = discounted_sums(batch.turns["reward"], owner, config.step_reward_gamma)
        group = batch.trajectories["traj_group_id"][owner]
        same_state = anchor_groups(batch.turns["anchor"], group, config.similarity_threshold)
        # As in A_E, trajectories that do not train are not counted among those that the others are compared with.
        step = normalise(returns, same_state, self.step_method, counted=trains(batch)[owner])
        advantages = config.episode_reward_weight * trajectories_to_tokens(batch, episode)
        advantages += config.step_reward_weight * turns_to_tokens(batch, step)
        return advantages, advantages.copy()


def _step_method(settings: RewardNormalization) -> Method:
    """How returns are normalised in an anchor group: as the scores are, whose scopes alone may be others. Raises
    ConfigError."""
    given = settings.norm_mean_type is not None or settings.norm_std_type is not None
    # norm_mean_type and norm_std_type name scopes for A_E. An anchor group is a scope of its own, so of them it takes
    # only whether σ divides.
    method: Method = settings.method or "mean_std"
    if given:
        method = "mean_std" if settings.norm_std_type is not None else "mean"
    if method == "identity" or (given and settings.norm_mean_type is None):
        what = "norm_mean_type: null beside norm_std_type" if given else "method: identity"
        raise ConfigError(
            f"reward_normalization: {what} subtracts no mean, and gigpo compares episodes and turns with their group's"
            " mean. Fix: method: mean_std or mean"
        )
    return method
