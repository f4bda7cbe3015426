"""A file that is a bomb, or that holds what no configuration can, is refused within seconds, in one line that names the
place and the fix."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.config import load
from turnwise.errors import ConfigError
from turnwise.plugins import Registry

DIGITS = "9" * 400
SECONDS = 20.0


@pytest.fixture
def refusal(base_yaml: str, tmp_path: Path, fake_registry: Registry) -> Callable[..., str]:
    """The one line with which a file is refused, of those that were written beside it."""

    def refused(head: str = "", tail: str = "", override: str = "", **beside: str) -> str:
        (tmp_path / "run.yaml").write_text(f"{head}{base_yaml}{tail}\n")
        for name, text in beside.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        began = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / "run.yaml", [override] if override else (), registry=fake_registry)
        assert time.monotonic() - began < SECONDS
        (line,) = caught.value.problems
        return line.replace(f"{tmp_path}/", "")

    return refused


def ten(text: str) -> str:
    return ", ".join([text] * 10)


def quoted(i: int) -> str:
    return f"'${{vars.a{i}}}'"


LETTERS = "abcdefghi"
BOMBS = {
    "aliases": (
        "a: &a [x]\n" + "".join(f"{n}: &{n} [{ten('*' + b)}]\n" for b, n in itertools.pairwise(LETTERS)),
        "10000 values",
    ),
    "nested merges": (
        "vars:\n  a0: &a0 {k: 1}\n"
        + "".join(f"  a{i + 1}: &a{i + 1} {{<<: *a{i}, k{i}: {{<<: *a{i}}}}}\n" for i in range(30)),
        "10000 values",
    ),
    "merged lists": (
        "vars:\n  a: &a {"
        + ", ".join(f"k{i}: 1" for i in range(2000))
        + "}\n  b: {<<: ["
        + ", ".join(["*a"] * 2000)
        + "]}\n",
        "`<<` brings more than 200000 keys",
    ),
    "interpolated texts": (
        "vars:\n  a0: xxxxxxxxxx\n" + "".join(f"  a{i + 1}: '{quoted(i)[1:-1] * 10}'\n" for i in range(9)),
        "too large",
    ),
    "interpolated lists": (
        "vars:\n  a0: [x]\n" + "".join(f"  a{i + 1}: [{ten(quoted(i))}]\n" for i in range(9)),
        "too large",
    ),
    "interpolated names": (
        "vars:\n  n0: a0\n  a0: xxxxxxxxxx\n"
        + "".join(f"  n{i + 1}: a{i + 1}\n  a{i + 1}: '{f'${{vars.${{vars.n{i}}}}}' * 10}'\n" for i in range(9)),
        "too large",
    ),
    "relative names": (
        "vars:\n  a0: xxxxxxxxxx\n" + "".join(f"  a{i + 1}: '{f'${{.a{i}}}' * 10}'\n" for i in range(9)),
        "too large",
    ),
    "a long chain": (
        "vars:\n  a0: x\n" + "".join(f"  a{i + 1}: '${{vars.a{i}}}'\n" for i in reversed(range(300))),
        "name one another in a row",
    ),
    "copies inside copies": (
        "vars:\n  a0: {x: 1}\n" + "".join(f"  a{i + 1}: {{x: '${{vars.a{i}}}'}}\n" for i in range(90)),
        "64 blocks inside each other, copied",
    ),
    "deep lists": (f"vars: {'[' * 300}{']' * 300}\n", "64 blocks inside each other"),
    "very deep lists": (f"vars: {'[' * 5000}{']' * 5000}\n", "64 blocks inside each other"),
    "deep mappings": (f"vars: {'{a: ' * 300}1{'}' * 300}\n", "64 blocks inside each other"),
    "a large file": ("vars:\n" + "".join(f"  key{i}: {i}\n" for i in range(50_000)), "more than 524288 bytes"),
    "an anchor that merges itself": ("vars: &a {<<: {<<: *a}}\n", "an anchor refers to itself"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_seconds(refusal: Callable[..., str], bomb: str) -> None:
    head, words = BOMBS[bomb]
    line = refusal(head)
    assert words in line
    assert "Fix: " in line
    assert len(line) < 1100


def test_equal_keys_that_are_merged_again_and_again_are_one_key(
    base_yaml: str, tmp_path: Path, fake_registry: Registry
) -> None:
    """Eight lines of ten aliases merge the same ten keys 10⁸ times, which is ten keys."""
    merges = "".join(f"  a{i + 1}: &a{i + 1} {{<<: [{ten(f'*a{i}')}], own{i}: {i}}}\n" for i in range(8))
    first = "vars:\n  a0: &a0 {" + ", ".join(f"k{i}: {i}" for i in range(10)) + "}\n"
    (tmp_path / "run.yaml").write_text(first + merges + base_yaml)
    config = load(tmp_path / "run.yaml", registry=fake_registry).config
    assert config.vars["a8"] == {**{f"k{i}": i for i in range(10)}, **{f"own{i}": i for i in range(8)}}


def test_the_first_of_several_merged_mappings_stands_and_the_own_keys_before_all(
    base_yaml: str, tmp_path: Path, fake_registry: Registry
) -> None:
    (tmp_path / "run.yaml").write_text(
        "vars:\n  a: &a {x: 1, y: 1, z: 1}\n  b: &b {x: 2, y: 2, w: 2}\n  c: {<<: [*a, *b], x: 3}\n" + base_yaml
    )
    assert load(tmp_path / "run.yaml", registry=fake_registry).config.vars["c"] == {"x": 3, "y": 1, "z": 1, "w": 2}


@pytest.mark.parametrize("several", [1, 10])
def test_files_that_include_one_another_again_and_again_are_refused(refusal: Callable[..., str], several: int) -> None:
    files = {f"i{n}": f"defaults: [{', '.join([f'i{n + 1}'] * several)}]\n" for n in range(200)}
    assert "defaults: reads more than 100 files. Fix: " in refusal("defaults: [i0]\n", **files, i200="vars: {a: 1}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vars: {1: a, '1': b}", "the key '1' stands here and in line 16"),
        ("vars: {'1': a, 1: b}", "the key 1 stands here and in line 16"),
        ("exp_name: !!timestamp 2020-01-01", "the tag 'tag:yaml.org,2002:timestamp' is not known"),
        ("exp_name: !!timestamp soon", "the tag 'tag:yaml.org,2002:timestamp' is not known"),
        ("exp_name: !!binary aGVsbG8=", "the tag 'tag:yaml.org,2002:binary' is not known"),
        ("eval_at_end: !!bool abc", "'abc' cannot be read as bool"),
        (f"gamma: {DIGITS}", "more than 300 digits"),
        (f"seed: 0x{'f' * 5000}", "more than 300 digits"),
        ('plugins: ["a\\0b.py"]', "a NUL character"),
        ('vars: {a: "\\ud800"}', "half of a surrogate pair"),
        (f"plugins: ['{'a' * 5000}.py']", "does not exist"),
        (f"defaults: ['{'a' * 5000}']", "neither a file beside this one nor a preset"),
        (f"output_dir: '{'a' * 5000}'", "must be a path of at most 4,095 bytes, 255 a name"),
        (f"exp_name: '{'${' * 300}{'}' * 300}'", "Fix: `${key}`"),
    ],
)
def test_what_no_configuration_can_hold_is_one_line(refusal: Callable[..., str], text: str, words: str) -> None:
    line = refusal(tail=text)
    assert line.startswith("run.yaml:16: ")
    assert words in line
    assert "Fix: " in line
    assert len(line) < 1100


@pytest.mark.parametrize(
    ("override", "words"), [(f"vars.a={'[' * 300}{']' * 300}", "64 blocks"), (f"{'vars' + '.a' * 400}=1", "64 blocks")]
)
def test_an_override_has_the_same_bounds(refusal: Callable[..., str], override: str, words: str) -> None:
    assert words in refusal(override=override)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_a_file_whose_name_no_file_can_have_is_one_line(fake_registry: Registry, name: str) -> None:
    with pytest.raises(ConfigError, match="Fix: ") as caught:
        load(name, registry=fake_registry)
    assert len(caught.value.problems[0]) < 1100


@pytest.mark.parametrize(
    ("included", "own"),
    [
        ("vars: {a: {b: 1}}", "vars: {a: [1]}"),
        ("vars: {a: [1]}", "vars: {a: {b: 1}}"),
        ("vars: {b: [1], a: '${.b}'}", "vars: {a: {c: 1}}"),
    ],
)
def test_a_list_takes_the_place_of_an_included_mapping_and_the_reverse(
    base_yaml: str, tmp_path: Path, fake_registry: Registry, included: str, own: str
) -> None:
    (tmp_path / "below.yaml").write_text(included)
    (tmp_path / "run.yaml").write_text(f"defaults: [below]\n{base_yaml}{own}\n")
    a = load(tmp_path / "run.yaml", registry=fake_registry).config.vars["a"]
    assert {"a": a} in ({"a": [1]}, {"a": {"b": 1}}, {"a": {"c": 1}})
