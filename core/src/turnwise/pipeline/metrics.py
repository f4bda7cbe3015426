"""The metrics of a step, by the names that docs/metrics.md lists; everything from the batch, in numpy."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from attrs import define, field

from turnwise.data.batch import Batch
from turnwise.data.normalise import RewardNormalization, normalise_scores
from turnwise.data.rows import UpdateResult
from turnwise.data.trajectory import Trajectory
from turnwise.pipeline.clock import Clock

DISCARDED = "discarded_tokens"


@define
class Reporting:
    """The tags of which some episode has reported `success`. There, an episode that reports none had none.

    Many environments report it at the end alone, or only where it is true; a mean over those that report it would be 1
    for random play.
    """

    tags: set[str] = field(factory=set)

    def known(self, tags: Sequence[str], success: np.ndarray) -> np.ndarray:
        """float64 [n]: `success` (NaN where an episode of `tags[i]` reported none) with 0 in place of NaN, but for tags
        that never report.

        Takes note of the tags that report here."""
        reported = ~np.isnan(success)
        self.tags |= {tag for tag, one in zip(tags, reported, strict=True) if one}
        reports = np.array([tag in self.tags for tag in tags], np.bool_)
        return np.where(~reported & reports, 0.0, success)

    def of(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """As `known`, for trajectories."""
        success = np.array([np.nan if t.success is None else float(t.success) for t in trajectories], np.float64)
        return self.known([t.tag for t in trajectories], success)

    def to_plain(self) -> list[str]:
        """For a checkpoint."""
        return sorted(self.tags)

    @classmethod
    def from_plain(cls, tags: Iterable[str]) -> Reporting:
        """Undo `to_plain`."""
        return cls(set(tags))


def batch_metrics(batch: Batch, reporting: Reporting | None = None) -> dict[str, float]:
    """Scores, groups and lengths of a step, before training. `reporting`: the run's (None: these trajectories are all
    there are)."""
    table = batch.trajectories
    scores = table["scores"]
    out = {
        "critic/score/mean": _mean(scores),
        "critic/score/max": float(scores.max()) if len(scores) else np.nan,
        "critic/score/min": float(scores.min()) if len(scores) else np.nan,
        "rollout/turns/mean": _mean(table["turns"]),
        "rollout/samples": float(len(batch.samples)),
        "rollout/trajectories_without_samples": float(len(scores) - len(np.unique(batch.samples["trajectory"]))),
    }
    success = (reporting or Reporting()).known([batch.tags[tag] for tag in table["tag"]], table["success"])
    reports = ~np.isnan(success)
    if reports.any():
        out["rollout/success"] = _mean(success[reports])
        out |= _group_success(table["traj_group_id"][reports], success[reports])
    for reason in np.unique(table["stop_reason"].astype(str)):
        out[f"rollout/stop/{reason}"] = float((table["stop_reason"] == reason).mean())
    return out | _lengths(batch)


def _group_success(group: np.ndarray, success: np.ndarray) -> dict[str, float]:
    _, index = np.unique(group, return_inverse=True)
    size = np.bincount(index)
    won = np.bincount(index, weights=(success == 1).astype(float))
    return {"group/all_correct_ratio": float((won == size).mean()), "group/all_wrong_ratio": float((won == 0).mean())}


def _lengths(batch: Batch) -> dict[str, float]:
    length, prompt = batch.samples["length"], batch.samples["prompt_length"]
    if not len(length):
        return {"tokens/batch_padded_seq_len": 0.0}
    response = length - prompt
    return {
        "tokens/prompt_length/mean": _mean(prompt),
        "tokens/prompt_length/max": float(prompt.max()),
        "tokens/response_length/mean": _mean(response),
        "tokens/response_length/max": float(response.max()),
        "tokens/batch_padded_seq_len": float(length.max()),
        "tokens/useful_ratio": float(length.sum() / (len(length) * length.max())),
        "tokens/sampled": float(batch.tokens["response_mask"].sum()),
        "tokens/total": float(length.sum()),
    }


def advantage_metrics(batch: Batch, normalization: RewardNormalization | None = None) -> dict[str, float]:
    """Advantages and rewards as the estimator left them."""
    sampled = batch.sampled
    advantages = batch.tokens["advantages"][sampled]
    out = {"critic/advantage/mean": _mean(advantages), "critic/reward/mean": _mean(_rewards(batch, normalization))}
    if not len(sampled):
        return out
    out |= {"critic/advantage/max": float(advantages.max()), "critic/advantage/min": float(advantages.min())}
    owner = batch.tokens["trajectory"][sampled]
    count = np.bincount(owner, minlength=len(batch.trajectories))
    has = count > 0
    mean = np.bincount(owner, weights=advantages, minlength=len(batch.trajectories))[has] / count[has]
    _, group = np.unique(batch.trajectories["traj_group_id"][has], return_inverse=True)
    top = np.full(group.max() + 1, -np.inf)
    bottom = np.full(group.max() + 1, np.inf)
    np.maximum.at(top, group, mean)
    np.minimum.at(bottom, group, mean)
    out["group/advantage_diff/mean"] = _mean(top - bottom)
    if "kl_penalty" in batch.tokens:
        out["critic/kl_penalty/mean"] = _mean(batch.tokens["kl_penalty"][sampled])
    return out


def _rewards(batch: Batch, normalization: RewardNormalization | None) -> np.ndarray:
    """The scores as the estimator normalises them (as they are, where it normalises turns instead); near 0 on average
    in a healthy run."""
    if normalization is None or normalization.grouping == "traj_id":
        return batch.trajectories["scores"]
    return normalise_scores(batch, normalization)


def update_metrics(results: Sequence[UpdateResult], prefix: str = "policy") -> dict[str, float]:
    """The step's updates as one: mean loss and gradient norm, per-token metrics as Σ w·m·x / Σ w·m over all of them."""
    if not results:
        return {}
    made = [r for r in results if not r.skipped]  # a skipped one reports what was not finite
    out = {
        f"{prefix}/loss": _mean([r.loss for r in made]),
        f"{prefix}/grad_norm": _mean([r.grad_norm for r in made]),
        f"{prefix}/updates": float(len(results)),
        f"{prefix}/skipped_updates": float(len(results) - len(made)),
    }
    for name in dict.fromkeys(n for r in results for n in r.sums):
        # Sums, not means of updates: updates differ in tokens, and a metric must not depend on how a step was cut.
        parts = [r.sums[name] for r in results if name in r.sums]
        weight = sum(w for _, w in parts)
        out[name] = sum(x for x, _ in parts) / weight if weight else np.nan
    return out


def evaluation_metrics(
    trajectories: Sequence[Trajectory], planned: dict[str, int], reporting: Reporting | None = None
) -> dict[str, float]:
    """Score, success and turns per tag and over all; `val/<tag>/failed` is the share of planned episodes that failed to
    play."""
    reporting = reporting or Reporting()
    reporting.of(trajectories)
    out: dict[str, float] = {}
    for tag, count in planned.items():
        mine = [t for t in trajectories if t.tag == tag]
        out |= {f"val/{tag}/{name}": value for name, value in _summary(mine, reporting).items()}
        out[f"val/{tag}/failed"] = 1 - len({(t.group, t.member) for t in mine}) / count if count else 0.0
    return out | {f"val/{name}": value for name, value in _summary(trajectories, reporting).items()}


def environment_metrics(trajectories: Sequence[Trajectory], reporting: Reporting | None = None) -> dict[str, float]:
    """`env/<tag>/…`: score, success, turns and the environment's own metrics per tag."""
    reporting = reporting or Reporting()
    by_tag: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_tag.setdefault(trajectory.tag, []).append(trajectory)
    return {
        f"env/{tag}/{name}": value for tag, mine in by_tag.items() for name, value in _summary(mine, reporting).items()
    }


def rollout_metrics(counts: Mapping[str, float], *, ahead: bool) -> dict[str, float]:
    """The counts of a step's batch. `ahead`: whether it was played ahead of the weights."""
    names = {f"rollout/{name}": float(value) for name, value in counts.items() if name != DISCARDED}
    # A run on written rollouts may read those of a version that did not count them.
    return names | ({f"async/{DISCARDED}": float(counts.get(DISCARDED, 0))} if ahead else {})


def throughput(values: Mapping[str, float], clock: Clock, epochs: int, worked: float) -> dict[str, float]:
    """Tokens per second of a step: trained, each once an epoch, and sampled in the `worked` seconds of the sampler."""
    trained, sampled = values.get("tokens/total", 0.0) * epochs, values.get("tokens/sampled", 0.0)
    return {
        "tps/actor_train": trained / max(clock.seconds("actor_train"), 1e-9),
        "tps/rollout": sampled / max(worked, 1e-9),
    }


def system_metrics() -> dict[str, float]:
    """`system/cpu_memory`: the driver's peak resident memory in GiB."""
    # ru_maxrss is in KiB on Linux.
    return {"system/cpu_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def _summary(trajectories: Sequence[Trajectory], reporting: Reporting) -> dict[str, float]:
    success = reporting.of(trajectories)
    out = {
        "score/mean": _mean([t.score for t in trajectories]),
        "turns/mean": _mean([len(t.turns) for t in trajectories]),
    }
    if len(reported := success[~np.isnan(success)]):
        out["success"] = _mean(reported)
    roles = sorted({t.role for t in trajectories} - {""})
    for role in roles:
        mine = [i for i, t in enumerate(trajectories) if t.role == role]
        out[f"{role}/score/mean"] = _mean([trajectories[i].score for i in mine])
        if len(reported := success[mine][~np.isnan(success[mine])]):
            out[f"{role}/success"] = _mean(reported)
    # Over those that report it: an environment may measure a thing in some of its episodes alone.
    names = dict.fromkeys(name for t in trajectories for name in t.metrics)
    return out | {name: _mean([t.metrics[name] for t in trajectories if name in t.metrics]) for name in names}


def _mean(values: Iterable[float] | np.ndarray) -> float:
    array = np.asarray(list(values) if not isinstance(values, np.ndarray) else values, np.float64)
    return float(array.mean()) if array.size else float("nan")
