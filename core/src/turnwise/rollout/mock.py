"""`rollout_mock`: the rollouts of a run written to files, and a training on them without playing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from turnwise.config.schema import RunConfig
from turnwise.contracts.rollout import RolloutResult
from turnwise.data.exact import decode, encode
from turnwise.errors import ConfigError, one_line


def dumps(config: RunConfig) -> bool:
    """Whether this run writes its rollouts."""
    return config.rollout_mock.enable and config.rollout_mock.mode == "dump"


def mocks(config: RunConfig) -> bool:
    """Whether this run trains on written rollouts."""
    return config.rollout_mock.enable and config.rollout_mock.mode == "mock"


def problems(config: RunConfig) -> list[str]:
    """Steps that a run in mode `mock` would not find, in one line."""
    if not mocks(config):
        return []
    missing = [step for step in range(config.max_steps) if not file_of(config, step).is_file()]
    if not missing:
        return []
    fix = f"max_steps: {missing[0]}" if missing[0] else "dump them first, with mode: dump"
    return [
        f"$.rollout_mock.dump_dir: {config.rollout_mock.dump_dir} holds no rollouts of step {missing[0]}, max_steps is"
        f" {config.max_steps}. Fix: {fix}"
    ]


def file_of(config: RunConfig, step: int) -> Path:
    """Where the rollouts of a step are."""
    assert config.rollout_mock.dump_dir is not None  # checked with the configuration
    return Path(config.rollout_mock.dump_dir) / f"rollouts-{step:06d}.npz"


def write(config: RunConfig, step: int, played: RolloutResult) -> Path:
    """Write a step's rollouts, replacing those of an earlier run. Raises ConfigError where an environment or manager
    put something into them that cannot be written exactly."""
    data = {
        "sizes": _sizes(config),
        "trajectories": played.trajectories,
        "samples": played.samples,
        "counts": played.counts,
        "failures": played.failures,
    }
    path = file_of(config, step)
    try:
        record, buffer = encode(data)
    except TypeError as error:
        text = str(error).removeprefix("it")
        raise ConfigError(
            f"$.rollout_mock: {path.name}: {text}. Fix: plain data and arrays in observations, state keys and extras."
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that is killed while it writes leaves no half file under the name that is read.
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, record=np.frombuffer(record, np.uint8), buffer=np.frombuffer(buffer, np.uint8))
    os.replace(partial, path)
    return path


def read(config: RunConfig, step: int) -> RolloutResult:
    """The rollouts of a step as they were played. Raises ConfigError for a file that is missing, damaged, or of another
    batch."""
    path = file_of(config, step)
    try:
        # Opened here: numpy leaves the file of a broken archive open.
        with path.open("rb") as raw, np.load(raw) as file:
            data = decode(file["record"].tobytes(), file["buffer"].tobytes())
    # Whatever it is: of a damaged file zipfile, zlib and numpy's reader of headers each raise errors of their own.
    except Exception as error:
        raise ConfigError(
            f"$.rollout_mock: {path} cannot be read ({one_line(error)}). Fix: dump the rollouts again."
        ) from error
    if data["sizes"] != _sizes(config):
        raise ConfigError(
            f"$.rollout_mock: {path} was dumped with {data['sizes']}, this run has {_sizes(config)}. Fix: the same"
            " sizes."
        )
    return RolloutResult(data["trajectories"], data["samples"], data["counts"], {}, data["failures"])


def _sizes(config: RunConfig) -> dict[str, int]:
    return {"rollout_batch_size": config.rollout_batch_size, "group_size": config.train_env_manager.group_size}
