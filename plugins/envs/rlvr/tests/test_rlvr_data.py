"""The data of `rlvr`: files of every kind, bad rows, splits by content, sources mixed by weight, generated questions."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError, MachineError
from turnwise_rlvr import arithmetic
from turnwise_rlvr.rlvr import Rlvr
from turnwise_rlvr.tasks import mixed

ROWS = [{"question": f"Question {n}?", "answer": str(n), "tag": f"t{n % 2}"} for n in range(60)]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def asked(data: Any, **options: Any) -> list[str]:
    """The questions in the order of their indices."""
    env = Rlvr(data=data, rewards="exact", **options)
    return [env.reset(options={"index": i})[0] for i in range(env.num_tasks)]


def test_json_lines_keep_the_order_of_the_file(tmp_path: Path) -> None:
    assert asked(jsonl(tmp_path / "a.jsonl", [*ROWS[:3], "", *ROWS[3:]])) == [row["question"] for row in ROWS]


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_its_first_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode())
    assert asked(str(tmp_path / "a.jsonl")) == ["Question 0?"]


def test_parquet_gives_the_same_questions(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=7)
    assert asked(str(tmp_path / "a.parquet")) == [row["question"] for row in ROWS]
    with pytest.raises(
        ConfigError, match=r"a.parquet has no column 'problem', rlvr. It has: answer, question, tag. Fix: columns"
    ):
        asked(str(tmp_path / "a.parquet"), columns={"question": "problem"})


def test_a_file_that_is_no_parquet_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"text")
    with pytest.raises(ConfigError, match=r"a.parquet cannot be read as Parquet"):
        asked(str(tmp_path / "a.parquet"))


def test_a_data_set_on_disk_gives_the_same_questions(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"))
    assert asked(str(tmp_path / "one")) == [row["question"] for row in ROWS]
    datasets.DatasetDict({"train": whole}).save_to_disk(str(tmp_path / "several"))
    with pytest.raises(ConfigError, match=r"several holds the splits train, rlvr. Fix: .*several/train"):
        asked(str(tmp_path / "several"))
    assert len(asked(str(tmp_path / "several" / "train"))) == 60


def test_files_of_no_kind_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n")
    with pytest.raises(ConfigError, match=r"a.csv is of no kind that is read, rlvr. Fix: one of .jsonl"):
        asked(str(tmp_path / "a.csv"))
    with pytest.raises(ConfigError, match=r"holds no Hugging Face data set"):
        asked(str(tmp_path))
    (tmp_path / "a.json").write_text("[\n" + json.dumps(ROWS[0]) + "\n]")
    with pytest.raises(ConfigError, match=r"holds a JSON list, rlvr. Fix: one object a line"):
        asked(str(tmp_path / "a.json"))
    with pytest.raises(ConfigError, match=r"no question in .*empty.jsonl"):
        asked(jsonl(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize(("kind", "module"), [("a.parquet", "pyarrow"), ("folder", "datasets")])
def test_a_missing_package_is_named_with_its_extra(
    kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
        (path / "state.json").write_text("{}")
    else:
        path.write_bytes(b"")
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    extra = "parquet" if module == "pyarrow" else "datasets"
    with pytest.raises(
        MachineError, match=rf"needs {module}, not installed, rlvr. Fix: pip install .*turnwise-rlvr\[{extra}\]"
    ):
        asked(str(path))


def test_a_column_that_no_row_has_is_reported_with_those_there_are(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"problem": "1?", "solution": "1"}] * 3)
    with pytest.raises(
        ConfigError, match=r"a.jsonl has no column 'question', rlvr.*It has: problem, solution. Fix: columns"
    ):
        asked(file)
    with pytest.raises(ConfigError, match=r"no column 'anwser'.*It has: problem"):
        asked(file, columns={"question": "problem", "answer": "anwser"})
    assert len(asked(file, columns={"question": "problem", "answer": "solution"})) == 3


BAD = [
    ("{", "line 2 is not JSON"),
    ("[1]", "line 2 is not an object but list"),
    ({"answer": "1"}, "line 2 has no question in 'question': None"),
    ({"question": " ", "answer": "1"}, "line 2 has no question in 'question': ' '"),
    ({"question": [{"role": "assistant", "content": "hi"}], "answer": "1"}, "line 2 has no question"),
    ({"question": "1?"}, "line 2 has no answer in 'answer'"),
    ({"question": "1?", "answer": ""}, "line 2 has no answer in 'answer': ''"),
    ({"question": "1?", "answer": None}, "line 2 has no answer"),
    ({"question": "1?", "answer": {"a": 1}}, "line 2 has no answer"),
    ({"question": "1?", "answer": "..."}, "line 2 has an answer of marks alone"),
    ({"question": "1?", "answer": "1", "choices": "ab"}, "line 2 has choices that are no list of texts: 'ab'"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_listed_with_its_line(row: Any, message: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [ROWS[0], row, ROWS[1]])
    with pytest.raises(
        ConfigError, match=r"data: 1 bad row, rlvr: .*Fix: repair them, or max_bad_rows: 1 to leave them out"
    ) as error:
        asked(file)
    assert message in str(error.value)
    assert asked(file, max_bad_rows=1) == ["Question 0?", "Question 1?"]


def test_a_row_that_is_not_utf_8_is_listed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json.dumps(ROWS[0]).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"line 2 is not UTF-8"):
        asked(str(tmp_path / "a.jsonl"))


def test_of_many_bad_rows_five_are_listed_and_all_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = jsonl(tmp_path / "a.jsonl", [ROWS[0], *[{"question": "1?"}] * 20])
    with pytest.raises(
        ConfigError, match=r"20 bad rows, rlvr: .*line 2 .*line 6 .*; and 15 more. Fix: .*max_bad_rows: 20"
    ) as error:
        asked(file, max_bad_rows=19)
    assert "line 7" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert asked(file, max_bad_rows=20) == ["Question 0?"]
    assert "leaves out 20 bad rows" in caplog.text


def test_a_choice_that_is_not_there_is_a_bad_row(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"question": "?", "answer": "green", "choices": ["red", "blue"]}])
    with pytest.raises(ConfigError, match=r"line 1 has the answer 'green', which is none of the choices"):
        Rlvr(data=file, rewards="choice")


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS[:2])
    assert len(asked(file)) == 2
    jsonl(tmp_path / "a.jsonl", ROWS[:5])
    assert len(asked(file)) == 5


# --- splits


def test_every_question_is_in_one_split_wherever_it_stands(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n}?", "answer": "x"} for n in range(1000)]
    forwards, backwards = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows[::-1])
    found = {split: set(asked(forwards, split=split)) for split in ("train", "val", "test")}
    assert {split: set(asked(backwards, split=split)) for split in found} == found
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 1000
    assert (640 < len(found["train"]) < 760, 60 < len(found["val"]) < 140, 150 < len(found["test"]) < 250) == (
        True,
    ) * 3


def test_a_question_written_twice_is_in_the_same_split(tmp_path: Path) -> None:
    """In other case, white space and forms of characters, and with other answers."""
    rows = [
        {"question": text.format(n), "answer": str(i)}
        for n in range(100)
        for i, text in enumerate(("What  is x² of {}?", "what is x2 of {}?", " WHAT IS X² OF {}?\n"))
    ]
    file = jsonl(tmp_path / "a.jsonl", rows)
    for split in ("train", "val", "test"):
        numbers = Counter(question.rstrip("?\n").split()[-1] for question in asked(file, split=split))
        assert set(numbers.values()) == {3}


def test_a_split_without_a_question_is_reported(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS[:1])
    empty = [split for split in ("train", "val", "test") if not _has(file, split)]
    assert len(empty) == 2
    with pytest.raises(ConfigError, match=rf"no question in split '{empty[0]}' \(of 1 in all\) in .*a.jsonl"):
        asked(file, split=empty[0])


def _has(file: str, split: str) -> bool:
    try:
        return bool(asked(file, split=split))
    except ConfigError:
        return False


# --- several sources


def test_rows_of_other_tags_are_left_out(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    assert asked({"path": file, "tags": ["t1"]}) == [f"Question {n}?" for n in range(1, 60, 2)]
    with pytest.raises(ConfigError, match=r"no question with the tags t7 in"):
        asked({"path": file, "tags": "t7"})


def test_a_source_names_its_own_tag_and_columns(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "a.jsonl", ROWS[:2])
    other = jsonl(tmp_path / "b.jsonl", [{"problem": "Else?", "answer": "B"}])
    data = [one, {"path": other, "tag": "quiz", "columns": {"question": "problem"}}]
    env = Rlvr(data=data, rewards=[{"use": "exact", "tags": ["t0", "t1"]}, {"use": "choice", "tags": ["quiz"]}])
    scores = []
    for index in range(3):
        env.reset(options={"index": index})
        scores += [name for name in env.step("B")[4]["metrics"] if name.startswith("score_")]
    assert sorted(scores) == ["score_choice", "score_exact", "score_exact"]


def test_some_weights_and_some_not_is_an_error(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"some entries have a weight and some have none"):
        asked([file, {"path": file, "weight": 2}])


def test_weights_are_shares_of_an_epoch_and_every_row_comes(tmp_path: Path) -> None:
    few = jsonl(tmp_path / "a.jsonl", ROWS[:10])
    many = jsonl(tmp_path / "b.jsonl", [{"question": f"Other {n}?", "answer": "1"} for n in range(60)])
    questions = asked([{"path": few, "weight": 3}, {"path": many, "weight": 1}])
    counts = Counter(questions)
    assert len(questions) == 240
    assert {counts[row["question"]] for row in ROWS[:10]} == {18}
    assert {counts[f"Other {n}?"] for n in range(60)} == {1}
    # Evaluation plays the first rows: they hold the shares, too.
    assert sum(question.startswith("Question") for question in questions[:20]) == 15


def test_weights_that_would_make_an_endless_epoch_are_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"an epoch has .* questions, more than 10,000,000"):
        asked([{"path": file, "weight": 1e9}, {"path": file, "weight": 1}])


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=4))
def test_every_task_comes_and_every_stretch_holds_its_shares(sources: list[tuple[int, int]]) -> None:
    sizes, weights = [size for size, _ in sources], [float(weight) for _, weight in sources]
    order = mixed(sizes, list(weights))
    assert set(order.tolist()) == set(range(sum(sizes)))
    source_of = np.repeat(np.arange(len(sizes)), sizes)[order]
    for i, weight in enumerate(weights):
        expected = np.arange(1, len(order) + 1) * weight / sum(weights)
        assert np.abs(np.cumsum(source_of == i) - expected).max() <= len(sizes) + 1
    assert sorted(mixed(sizes, [None] * len(sizes)).tolist()) == list(range(sum(sizes)))


# --- generated questions


@pytest.mark.parametrize("operations", ["+", "-", ("+", "-")])
def test_generated_sums_are_different_right_and_within_the_bounds(operations: Any) -> None:
    rows = list(arithmetic.rows({"count": 300, "terms": (2, 5), "largest": 12, "operations": operations}))
    assert len({row["question"] for row in rows}) == len(rows) == 300
    for row in rows:
        words = row["question"].removesuffix(" =").split()
        value = int(words[0])
        for sign, number in zip(words[1::2], words[2::2]):
            assert sign in operations
            value += int(number) if sign == "+" else -int(number)
            assert 0 <= value <= 12
        assert value == int(row["answer"])
        assert 2 <= len(words[::2]) <= 5


def test_generated_extremes_are_right_and_no_answer_is_much_more_common_than_the_others() -> None:
    rows = list(arithmetic.rows({"count": 2000, "operations": ("max", "min")}))
    for row in rows:
        name, *numbers, _ = row["question"].split()
        assert int(row["answer"]) == {"max": max, "min": min}[name](map(int, numbers))
        assert 2 <= len(numbers) <= 4
    counts = Counter(row["answer"] for row in rows)
    assert len(counts) == 10
    assert max(counts.values()) / 2000 < 0.16


def test_the_seed_of_a_generator_gives_other_questions() -> None:
    first, again = list(arithmetic.rows({"count": 50})), list(arithmetic.rows({"count": 50, "seed": 0}))
    assert first == again != list(arithmetic.rows({"count": 50, "seed": 1}))
