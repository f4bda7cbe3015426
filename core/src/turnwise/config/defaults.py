"""Defaults that depend on other keys, put into the plain data before it is converted."""

from __future__ import annotations

from typing import Any

from turnwise.config.problems import Data, Path, Report
from turnwise.config.schema import MANAGERS


def add_defaults(data: Data, report: Report) -> None:
    """`output_dir` under the run's name, sampling of evaluation over that of training, an even split of the groups over
    the tags."""
    if "output_dir" not in data:
        data["output_dir"] = f"runs/{data.get('exp_name', 'turnwise')}"
    # Evaluation is greedy unless it says otherwise.
    _sampling(data, "val_env_manager", {"temperature": 0}, report)
    if isinstance(data.get("train_env_manager"), dict) and data["train_env_manager"].get("generating_args") is not None:
        _sampling(data, "train_env_manager", {}, report)
    for manager in MANAGERS:
        if isinstance(data.get(manager), dict):
            _tags(data, manager, report)
            _split(data[manager])
    _batch_of_evaluation(data)
    for role in ("reference", "critic"):
        _like_the_actor(data, role, report)
    # The raw data are asked: the conversion that follows would make no reference of a missing block.
    if "reference" not in data and any(_positive(data.get(key)) for key in ("init_kl_coef", "kl_loss_coef")):
        data["reference"] = {}
        _like_the_actor(data, "reference", report)
        report.note(("reference",), "not given, but a KL coefficient is positive: loaded like actor_train")


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _sampling(data: dict[str, Any], manager: str, first: dict[str, Any], report: Report) -> None:
    """`generating_args` of a manager: actor_infer's, then `first`, then its own."""
    block = data.get(manager)
    infer = data.get("actor_infer")
    below = infer.get("generating_args") if isinstance(infer, dict) else None
    if not isinstance(block, dict) or not isinstance(block.get("generating_args") or {}, dict):
        return
    own = block.get("generating_args") or {}
    if isinstance(below, dict):
        for key in below:
            # Blamed on the key that the user wrote, if it does not fit.
            if key not in own and key not in first:
                report.sources.moved[manager, "generating_args", key] = ("actor_infer", "generating_args", key)
        first = {**below, **first}
    block["generating_args"] = {**first, **own}


def _tags(data: dict[str, Any], manager: str, report: Report) -> None:
    """The only tag there is, where none is named."""
    environments = data.get("custom_envs")
    path: Path = (manager, "tags")
    if not data[manager].get("tags") and isinstance(environments, dict):
        if len(environments) == 1:
            data[manager]["tags"] = list(environments)
        else:
            report.error(
                path, "names no environment. Fix: list tags of custom_envs: [" + ", ".join(map(str, environments)) + "]"
            )


def _split(block: dict[str, Any]) -> None:
    tags, groups = block.get("tags"), block.get("num_env_groups", 1)
    if not block.get("num_groups_partition") and isinstance(tags, list) and tags and type(groups) is int and groups > 0:
        each, rest = divmod(groups, len(tags))
        # The first tags get the rest, one group each.
        block["num_groups_partition"] = [each + (i < rest) for i in range(len(tags))]


def _batch_of_evaluation(data: dict[str, Any]) -> None:
    block = data.get("val_env_manager")
    if isinstance(block, dict) and data.get("val_batch_size") is None:
        groups, size = block.get("num_env_groups", 1), block.get("group_size", 1)
        # The conversion that follows reports what is no number.
        if type(groups) is int and type(size) is int and groups > 0 < size:
            data["val_batch_size"] = groups * size


def _like_the_actor(data: dict[str, Any], role: str, report: Report) -> None:
    """A second role without a strategy, model settings or devices of its own takes the actor's."""
    actor, block = data.get("actor_train"), data.get(role)
    if not isinstance(actor, dict) or not isinstance(block, dict):
        return
    for key in ("strategy_args", "model_args", "device_mapping"):
        if key in actor and block.get(key) is None:
            # A copy: a translation or a choice changes the blocks in place.
            block[key] = _copy(actor[key])
            report.sources.moved[role, key] = ("actor_train", key)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value
