"""The study's runs: every combination as a configuration, played out one after the other, its numbers kept as one JSON
line.

A line is found again by the run's name and the digest of its configuration, so a finished run is not run again and a
changed one is.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
MANAGERS = ("trajectory", "stepwise", "merged")
ESTIMATORS = ("grpo", "gigpo", "gae", "reinforce_plus_plus")
STEPS = 84  # of 128 trajectories
LINEAR = {"learning_rate": 3.0e-3, "lr_scheduler_type": "linear", "warmup_steps": 5}


@frozen
class Run:
    """One training: which environment, how it is cut into samples, which estimator, which seed, and its whole
    configuration."""

    env: str
    manager: str
    estimator: str
    seed: int
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """Unique among the runs of one study."""
        return f"{self.env}-{self.manager}-{self.estimator}-{self.seed}"

    @property
    def digest(self) -> str:
        """Of the configuration without the folder it writes to."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def keys(self) -> dict[str, Any]:
        """What its line among the results begins with."""
        chosen = {"env": self.env, "manager": self.manager, "estimator": self.estimator, "seed": self.seed}
        return {"name": self.name, "digest": self.digest, **chosen}


def manager_of(cut: str, history: int | None) -> dict[str, Any]:
    """The environment manager's block. `history`: earlier turns that a step-wise prompt shows; a trajectory, and what
    is to merge, show all."""
    if cut == "trajectory":
        return {"use": "trajectory", "action_pattern": "(.*)"}
    if cut == "merged":
        return {"use": "stepwise", "merge_steps": True, "action_pattern": "(.*)"}
    return {"use": "stepwise", "history_length": history, "action_pattern": "(.*)"}


def choose_estimator(config: dict[str, Any], estimator: str) -> None:
    """Give `config` the estimator: the group-relative ones keep its `reward_normalization`, `gae` gets a critic, the
    others their defaults."""
    config["adv_estimator"] = estimator
    if estimator not in ("grpo", "gigpo"):
        config.pop("reward_normalization", None)
    if estimator in ("gigpo", "reinforce_plus_plus"):
        # with the 0.03 of the examples both kept to one direction by step 20: their advantages are larger beside the
        # entropy bonus
        config["entropy_loss_coef"] = {"start": 0.1, "end": 0.0}
    if estimator == "gae":
        batches = {
            name: config["actor_train"]["training_args"][name]
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        }
        config["critic"] = {"training_args": {**LINEAR, **batches}}


def frozen_lake(cut: str, estimator: str, seed: int, steps: int = STEPS) -> Run:
    """The main job's lake with shorter episodes and answers and half its batch, four updates a step as there: 36 runs
    in about an hour."""
    config = _example("frozen_lake.yaml")
    config |= {"max_steps": steps, "eval_steps": max(1, steps // 6), "sequence_length": 320, "rollout_batch_size": 128}
    config["train_env_manager"]["num_env_groups"] = 8
    config["actor_train"]["training_args"]["per_device_train_batch_size"] = 32
    config["actor_infer"]["generating_args"]["max_new_tokens"] = 3
    for env in config["custom_envs"].values():
        env |= {"max_steps": 6, "env_manager": manager_of(cut, 0)}
    return _finished("frozen_lake", config, cut, estimator, seed)


def sokoban(cut: str, estimator: str, seed: int, steps: int = STEPS) -> Run:
    """Small rooms with one box, described in words beside the picture."""
    config = _example("sokoban.yaml")
    config |= {"max_steps": steps, "eval_steps": max(1, steps // 4)}
    for env in config["custom_envs"].values():
        env["env_manager"] = manager_of(cut, 0)
    return _finished("sokoban", config, cut, estimator, seed)


def all_runs(seeds: Iterable[int] = (0, 1, 2)) -> list[Run]:
    """Seed by seed, so that a study cut short holds whole tables of fewer seeds; Sokoban after the first seed."""
    runs: list[Run] = []
    for number, seed in enumerate(seeds):
        runs += [frozen_lake(cut, estimator, seed) for estimator in ESTIMATORS for cut in MANAGERS]
        if number == 0:
            runs += [
                sokoban(cut, estimator, seed) for estimator in ("grpo", "gigpo") for cut in ("stepwise", "trajectory")
            ]
    return runs


def _example(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return copy.deepcopy(loaded)  # YAML's anchors share mappings; what is set in one place must not appear in another


def _finished(env: str, config: dict[str, Any], cut: str, estimator: str, seed: int) -> Run:
    config.pop("action_pattern", None)
    config = json.loads(json.dumps(config))
    config["plugins"] += [name for name in ("turnwise-gigpo", "turnwise-gae") if name not in config["plugins"]]
    config |= {"seed": seed, "render_save_dir": None, "track_with": ["jsonl"]}
    if (cut, estimator, seed) != ("stepwise", "grpo", 0):
        config["baselines"] = []  # the players without a model play once
    choose_estimator(config, estimator)
    return Run(env, cut, estimator, seed, config)


# ---- running


def finished(work: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The lines of the finished runs, by name and digest; a line that a kill cut short is not one."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    path = work / "results.jsonl"
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        lines[line["name"], line["digest"]] = line
    return lines


def play_all(runs: Iterable[Run], work: Path) -> Iterator[tuple[Run, dict[str, Any] | None]]:
    """Each run with its line, one after the other; None where a run failed (its log says why): the others go on."""
    work.mkdir(parents=True, exist_ok=True)
    known = finished(work)
    for run in runs:
        line = known.get((run.name, run.digest))
        if line is None:
            line = play(run, work)
            if line is not None:
                with (work / "results.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        yield run, line


def play(run: Run, work: Path) -> dict[str, Any] | None:
    """Train in a process of its own, under `work`/NAME; None if that process failed."""
    folder = work / f"{run.name}-{run.digest}"
    file = work / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump({**run.config, "output_dir": str(folder)}, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "turnwise.cli.main", "train", str(file)]
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with (work / f"{run.name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        return None
    reported = [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        **run.keys,
        **measured(reported),
        "players": players(folder / "report.md"),
        "wall": time.perf_counter() - began,
        "cpu": spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime,
        "machine": machine(),
    }


def measured(reported: list[dict[str, float]]) -> dict[str, Any]:
    """What a run's metrics say: greedy success on held-out levels over the steps, success in training, and what was
    used."""
    trained = [line for line in reported if "rollout/samples" in line]
    held_out = [line for line in reported if "val/success" in line]
    tenth = trained[-max(1, len(trained) // 10) :]
    return {
        "steps": len(trained),
        "evals": [[line["step"], line["val/success"], line["val/score/mean"]] for line in held_out],
        "failed": sum(
            value
            for line in held_out
            for name, value in line.items()
            if name.startswith("val/") and name.endswith("/failed")
        ),
        "training": [line["rollout/success"] for line in trained],
        "entropy": [line["policy/entropy"] for line in trained],
        "trajectories": sum(line["rollout/episodes"] for line in trained),
        "turns": sum(line["rollout/turns"] for line in trained),
        "samples": sum(line["rollout/samples"] for line in trained),
        "tokens": sum(line["tokens/total"] for line in trained),
        "sampled_tokens": sum(line["tokens/sampled"] for line in trained),
        "last_turns": statistics.mean(line["rollout/turns"] / line["rollout/episodes"] for line in tenth),
        "last_samples": statistics.mean(line["rollout/samples"] / line["rollout/episodes"] for line in tenth),
    }


def players(report: Path) -> dict[str, float]:
    """The success of the players without a model, from the run's report: its table that begins with `player`."""
    lines = report.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| player |"))
    rows = [
        line.strip("| ").split("|") for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    ]
    column = next(i for i, name in enumerate(rows[0]) if name.strip().endswith("success"))
    return {row[0].strip(): float(row[column]) for row in rows[2:] if not row[0].startswith("model")}


def machine() -> str:
    """The machine in a few words."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        model = f" ({names[0]})" if names else ""
    return (
        f"{os.cpu_count()} cores of {platform.machine()}{model},"
        f" OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"
    )


def by_combination(lines: Iterable[Mapping[str, Any]], env: str) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """(manager, estimator) → the lines of its seeds, in their order."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in sorted((line for line in lines if line["env"] == env), key=lambda line: line["seed"]):
        found.setdefault((line["manager"], line["estimator"]), []).append(line)
    return found
