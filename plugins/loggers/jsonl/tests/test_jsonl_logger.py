"""The jsonl logger: what stands in its files, and what a resume leaves there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.logger import LoggerContext
from turnwise.data import Trajectory, Turn
from turnwise.data.record import plain, trajectory_record
from turnwise_jsonl.config import JsonlConfig
from turnwise_jsonl.logger import JsonlLogger


def make(folder: Path, **options: Any) -> JsonlLogger:
    return JsonlLogger(JsonlConfig(**options), LoggerContext(folder))


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def played(group: int = 0) -> Trajectory:
    image = np.zeros((4, 6, 3), np.uint8)
    turn = Turn(
        prompt_ids=np.array([5, 6], np.int32),
        response_ids=np.array([7, 8, 9], np.int32),
        response_mask=np.array([True, True, False]),
        logprobs=np.array([-0.5, np.nan, 0.0], np.float32),
        versions=np.array([3, 3, -1], np.int32),
        reward=0.5,
        anchor="s0",
        observation=[{"type": "text", "text": "Zwölf 🧊"}, {"type": "image", "image": image}],
        text="up!",
        action="up",
        images=(0,),
        metrics={"invalid": 0.0},
    )
    return Trajectory(
        "Lake", group, 1, 77, (turn,), "terminated", success=True, images=(image,), final_observation="done"
    )


def test_metrics_are_one_line_a_step_with_null_for_nan_and_infinity(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"policy/loss": math.nan, "a/b": np.float64(0.5), "c": math.inf})
    logger.scalars(1, {"new/name": 3})
    logger.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 0, "policy/loss": None, "a/b": 0.5, "c": None},
        {"step": 1, "new/name": 3},
    ]


def test_a_step_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"a": 1.0})
    logger.trajectories(0, "train", [played()])
    assert len(read(tmp_path / "metrics.jsonl")) == len(read(tmp_path / "trajectories/train.jsonl")) == 1
    logger.close()


def test_trajectory_record_holds_every_token_and_images_as_shapes(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.trajectories(4, "val", [played()])
    logger.close()
    (record,) = read(tmp_path / "trajectories/val.jsonl")
    (turn,) = record.pop("turns")
    assert record == {
        "step": 4,
        "tag": "Lake",
        "group": 0,
        "member": 1,
        "attempt": 0,
        "seed": 77,
        "score": 0.5,
        "stop_reason": "terminated",
        "success": True,
        "final_observation": "done",
        "images": [[4, 6, 3]],
        "metrics": {},
    }
    assert turn == {
        "text": "up!",
        "action": "up",
        "observation": [
            {"type": "text", "text": "Zwölf 🧊"},
            {"type": "image", "image": {"shape": [4, 6, 3], "dtype": "uint8"}},
        ],
        "reward": 0.5,
        "finish": "stop",
        "prompt_ids": [5, 6],
        "response_ids": [7, 8, 9],
        "response_mask": [1, 1, 0],
        "logprobs": [-0.5, None, 0.0],
        "versions": [3, 3, -1],
        "images": [0],
        "metrics": {"invalid": 0.0},
    }


def test_a_trajectory_without_turns_or_log_probs_is_a_line(tmp_path: Path) -> None:
    record = trajectory_record(0, Trajectory("Lake", 0, 0, 1, (), "length"))
    assert (record["score"], record["success"], record["turns"]) == (0.0, None, [])
    json.dumps(record, allow_nan=False)


def test_text_that_is_not_unicode_is_written_as_its_escape(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.trajectories(0, "train", [Trajectory("\udc80", 0, 0, 1, (), "length")])
    logger.close()
    assert read(tmp_path / "trajectories/train.jsonl")[0]["tag"] == "\udc80"


def test_plain_turns_numpy_and_unknown_objects_into_json() -> None:
    assert plain({1: np.bool_(True), "x": (np.int64(3), np.array([1.0, np.nan])), "o": {2}}) == {
        "1": True,
        "x": [3, [1.0, None]],
        "o": "{2}",
    }


def test_every_thins_training_but_never_evaluation(tmp_path: Path) -> None:
    logger = make(tmp_path, every=3)
    for step in range(7):
        logger.trajectories(step, "train", [played()])
        logger.trajectories(step, "val", [played()])
    logger.close()
    assert [r["step"] for r in read(tmp_path / "trajectories/train.jsonl")] == [0, 3, 6]
    assert len(read(tmp_path / "trajectories/val.jsonl")) == 7


def test_trajectories_false_writes_metrics_alone(tmp_path: Path) -> None:
    logger = make(tmp_path, trajectories=False)
    logger.trajectories(0, "train", [played()])
    logger.scalars(0, {})
    logger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_every_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every"):
        JsonlConfig(every=0)


def test_resume_drops_the_step_and_later_and_a_cut_line_and_touches_no_other_file(tmp_path: Path) -> None:
    logger = make(tmp_path, every=1)
    for step in range(12):
        logger.scalars(step, {"a": float(step)})
        logger.trajectories(step, "train", [played(0), played(1)])
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "a": 0.')  # killed in the middle of a line
    (tmp_path / "other.jsonl").write_text('{"step": 50}\n', encoding="utf-8")

    again = make(tmp_path)
    again.resume(10)
    again.scalars(10, {"a": -1.0})
    again.close()

    assert [(r["step"], r["a"]) for r in read(tmp_path / "metrics.jsonl")] == [
        *((s, float(s)) for s in range(10)),
        (10, -1.0),
    ]
    assert [r["step"] for r in read(tmp_path / "trajectories/train.jsonl")] == [s for s in range(10) for _ in range(2)]
    assert (tmp_path / "other.jsonl").read_text(encoding="utf-8") == '{"step": 50}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "other.jsonl", "trajectories"]


def test_resume_of_an_open_logger_and_before_the_first_line(tmp_path: Path) -> None:
    logger = make(tmp_path / "run")
    logger.resume(5)
    logger.scalars(5, {"a": 1.0})
    logger.resume(5)
    logger.scalars(5, {"a": 2.0})
    logger.close()
    assert read(tmp_path / "run" / "metrics.jsonl") == [{"step": 5, "a": 2.0}]


def test_a_cut_line_is_never_continued(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "a', encoding="utf-8")
    logger = make(tmp_path)
    logger.scalars(1, {"a": 1.0})
    logger.close()
    assert read(tmp_path / "metrics.jsonl") == [{"step": 0}, {"step": 1, "a": 1.0}]


def test_a_failed_rewrite_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"a": 1.0})

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("turnwise_jsonl.logger.os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        logger.resume(0)
    assert read(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 1.0}]


def test_close_twice_and_nothing_is_made_by_building(tmp_path: Path) -> None:
    logger = make(tmp_path / "run")
    logger.artifact(0, "x", tmp_path / "none.png")
    logger.close()
    logger.close()
    assert not (tmp_path / "run").exists()
