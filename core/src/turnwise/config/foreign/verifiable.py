"""ROLL's pipeline of verifiable rewards: its data sets and rewards become one environment `rlvr`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.config.foreign.translate import NOTHING, Edit
from turnwise.config.problems import at

TAG = "Rlvr"
WORKERS = {"MathRuleRewardWorker": "math", "MultipleChoiceBoxedRuleRewardWorker": "choice"}
"""Reward workers that have a counterpart, by the name of their class."""
HOLDERS: tuple[tuple[str, ...], ...] = (("actor_train", "data_args"), ("data_args",))
"""Where the data sets may stand; the first that names files counts."""


def rewards(edit: Edit) -> None:
    """`rewards` with the data sets of actor_train become an environment `rlvr` where no environment is named."""
    edit.drop()
    where = next((path for path in HOLDERS if isinstance(edit.get(*path, "file_name"), str | list)), None)
    if edit.get("custom_envs") is not NOTHING or where is None or not isinstance(edit.value, Mapping):
        edit.refuse(
            f"rewards belongs to another pipeline than the agentic one: {edit.why}",
            "custom_envs and val_env_manager",
        )
        return
    data_args = at(edit.data, where)
    files, shares = data_args.pop("file_name"), data_args.pop("domain_interleave_probs", None) or {}
    made, tags = _entries(edit)
    if made is None:
        return
    if unknown := [name for name in shares if name not in tags]:
        edit.refuse(f"domain_interleave_probs names {unknown[0]!r}, which rewards does not", "a domain of rewards")
        return
    config: dict[str, Any] = {
        "data": _data(files, tags, shares),
        "columns": {
            "question": data_args.get("messages") or data_args.get("prompt") or "messages",
            "answer": "ground_truth",
        },
        "rewards": made,
    }
    env = {"env_type": "rlvr", "max_steps": 1, "env_config": config}
    if edit.put(("custom_envs",), {TAG: env}) and edit.put(("train_env_manager", "tags"), [TAG]):
        edit.note(f"is custom_envs.{TAG} here, of type rlvr, with {'.'.join(where)}.file_name")


def _entries(edit: Edit) -> tuple[list[dict[str, Any]] | None, dict[str, list[str]]]:
    """The environment's rewards (None where one has no counterpart, which is reported), and the tags of each domain."""
    made: list[dict[str, Any]] = []
    tags: dict[str, list[str]] = {}
    for domain, block in edit.value.items():
        worker = str(block.get("worker_cls") if isinstance(block, Mapping) else block).rpartition(".")[2]
        if worker not in WORKERS:
            known = ", ".join(WORKERS)
            edit.refuse(
                f"{domain}.worker_cls {worker!r} has no counterpart; these have: {known}",
                "remove the domain, or write custom_envs with rewards: [{use: judge, model: NAME, base_url: ADDRESS}]",
            )
            return None, tags
        found = block.get("tag_included") or []
        tags[str(domain)] = [found] if isinstance(found, str) else list(found)
        made.append({"use": WORKERS[worker], **({"tags": tags[str(domain)]} if found else {})})
    return made, tags


def _data(files: str | list[str], tags: dict[str, list[str]], shares: Mapping[str, float]) -> Any:
    """The files with the tags of all domains; with shares, an entry for each domain that has one."""
    if shares:
        domains = [(tags[domain], share) for domain, share in shares.items() if share]
        return [{"path": files, **({"tags": found} if found else {}), "weight": share} for found, share in domains]
    wanted = [tag for found in tags.values() for tag in found]
    # A domain without tags takes every row.
    return {"path": files, "tags": wanted} if wanted and all(tags.values()) else {"path": files}
