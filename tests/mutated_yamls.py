"""Mutated configurations: `python tests/mutated_yamls.py [COUNT] [SEED]` gives each to `plan` and `check` and prints
what should not be.

A mutant must end within seconds in a report whose lines name the place and the fix, or be accepted; what is wrong by
construction must be refused. Never a traceback, never a success that is none, never a hang."""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen
from judged import SECONDS, current, run
from mutated_values import BASE, BLOCKS, NO_NUMBER, NUMBERS, ODD, OUT_OF_RANGE, UNRESOLVED

from turnwise.config.foreign.keys import RULES
from turnwise.plugins import reset_registry


@frozen
class Mutant:
    """A configuration. `refused`: it is wrong by construction."""

    number: int
    kind: str
    text: str
    overrides: tuple[str, ...] = ()
    refused: bool = False


def mutants(count: int, seed: int = 0) -> Iterator[Mutant]:
    """`count` mutants, the same ones for a seed."""
    for number in range(count):
        rng = random.Random(f"{seed}:{number}")
        kind = rng.choice(list(KINDS))
        text, overrides, refused = KINDS[kind](rng)
        yield Mutant(number, kind, text, overrides, refused)


Made = tuple[str, tuple[str, ...], bool]


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _holder(data: Any, path: tuple[Any, ...]) -> Any:
    for part in path[:-1]:
        data = data[part]
    return data


def _dump(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _with(path: tuple[Any, ...], value: Any) -> str:
    data = yaml.safe_load(BASE)
    _holder(data, path)[path[-1]] = value
    return _dump(data)


def _misspelt(rng: random.Random) -> Made:
    data = yaml.safe_load(BASE)
    path = rng.choice(
        [p for p in _paths(data) if isinstance(p[-1], str) and p[0] not in ("vars",) and "system_envs" not in p[:-1]]
    )
    key = path[-1]
    cut = rng.randrange(len(key))
    odd = rng.choice([key[:cut] + key[cut + 1 :], f"{key[:cut]}{rng.choice('xqz_')}{key[cut:]}", key.upper()])
    holder = _holder(data, path)
    if odd in holder or not odd or odd == key:
        return BASE, (), False
    items = [(odd if k == key else k, v) for k, v in holder.items()]
    holder.clear()
    holder.update(items)
    return _dump(data), (), path != ("custom_envs", "Count")


def _no_number(rng: random.Random) -> Made:
    return _with(rng.choice(sorted(NUMBERS)), rng.choice(NO_NUMBER)), (), True


def _out_of_range(rng: random.Random) -> Made:
    return _with(rng.choice(sorted(NUMBERS)), rng.choice(OUT_OF_RANGE)), (), True


def _no_block(rng: random.Random) -> Made:
    return _with((rng.choice(BLOCKS),), rng.choice(["text", 3, [1], [["x"]]])), (), True


def _unresolved(rng: random.Random) -> Made:
    path = rng.choice([p for p in _paths(yaml.safe_load(BASE)) if p != ("vars",)])
    value = rng.choice(UNRESOLVED)
    return _with(path, value), (), True


def _odd(rng: random.Random) -> Made:
    data = yaml.safe_load(BASE)
    for path in rng.sample(list(_paths(data)), rng.randint(1, 3)):
        try:
            _holder(data, path)[path[-1]] = rng.choice(ODD)
        except (TypeError, KeyError, IndexError):
            continue  # under a value that was just replaced
    return _dump(data), (), False


def _missing(rng: random.Random) -> Made:
    data = yaml.safe_load(BASE)
    path = rng.choice(list(_paths(data)))
    del _holder(data, path)[path[-1]]
    needed = {
        ("max_steps",),
        ("rollout_batch_size",),
        ("pretrain",),
        ("train_env_manager",),
        ("custom_envs",),
        ("custom_envs", "Count", "env_type"),
    }
    return _dump(data), (), path in needed


def _damaged(rng: random.Random) -> Made:
    text = BASE
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        change = rng.randrange(4)
        bad = rng.choice(
            [
                "\t",
                "\0",
                "\x1b",
                ":",
                "{",
                "}",
                "[",
                "]",
                "'",
                '"',
                "&a ",
                "*a",
                "!!x ",
                "- ",
                "\n",
                "#",
                "%",
                "@",
                "`",
                "|",
                "🙂",
                "\u00a0",
                "? ",
            ]
        )
        text = text[:at] + ("" if change == 0 else bad) + text[at + (change < 2) :]
    return text, (), False


def _doubled(rng: random.Random) -> Made:
    lines = BASE.splitlines()
    line = rng.choice([one for one in lines if re.match(r"\w+: \S", one)])
    return "\n".join([*lines, line]) + "\n", (), True


def _shuffled(rng: random.Random) -> Made:
    lines = BASE.splitlines()
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    if rng.random() < 0.5:
        del lines[rng.randrange(len(lines))]
    return "\n".join(lines) + "\n", (), False


def _overridden(rng: random.Random) -> Made:
    path = rng.choice(list(_paths(yaml.safe_load(BASE))))
    key = ".".join(map(str, path))
    key = rng.choice(
        [key, f"{key}.x", f"{key}[0]", f"+{key}", f"~{key}", f"{key}.{'a.' * 70}b", key.upper(), f".{key}", f"{key}."]
    )
    value = rng.choice(
        [
            *map(json.dumps, ODD[:10]),
            "[",
            "{a: ",
            "!!x 1",
            "${nope}",
            "'",
            "x: y: z",
            "*a",
            "&a 1",
            "[" * 100,
            "\0",
            "1e999",
            "0b",
            ".inf",
        ]
    )
    return BASE, (rng.choice([f"{key}={value}", key, f"{key}==", "=", ""]),), False


def _foreign(rng: random.Random) -> Made:
    data = yaml.safe_load(BASE)
    for rule in rng.sample(RULES, rng.randint(1, 3)):
        path = tuple(
            {"ROLE": "actor_train", "MANAGER": "train_env_manager", "TAG": "Count"}.get(p, p.replace("*", "x"))
            for p in rule.key.split(".")
        )
        holder = data
        for part in path[:-1]:
            holder = holder.setdefault(part, {}) if isinstance(holder.get(part, {}), dict) else {}
        holder[path[-1]] = rng.choice(ODD)
    return _dump(data), (), False


def _bomb(rng: random.Random) -> Made:
    depth = rng.randint(70, 2000)
    head = rng.choice(
        [
            "a0: &a0 [x]\n"
            + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(rng.randint(5, 9))),
            f"deep: {'[' * depth}{']' * depth}\n",
            f"deep: {'{a: ' * depth}1{'}' * depth}\n",
            "x0: &x0 {k: 1}\n"
            + "".join(f"x{i + 1}: &x{i + 1} {{<<: *x{i}, k{i}: {{<<: *x{i}}}}}\n" for i in range(20)),
            f"long: '{'a' * 600_000}'\n",
            f"defaults: [{', '.join(['run'] * rng.randint(1, 200))}]\n",
        ]
    )
    return head + BASE, (), True


KINDS: dict[str, Callable[[random.Random], Made]] = {
    "misspelt": _misspelt,
    "no number": _no_number,
    "out of range": _out_of_range,
    "no block": _no_block,
    "unresolved": _unresolved,
    "odd": _odd,
    "odd again": _odd,
    "missing": _missing,
    "damaged": _damaged,
    "damaged again": _damaged,
    "doubled": _doubled,
    "shuffled": _shuffled,
    "overridden": _overridden,
    "foreign": _foreign,
    "bomb": _bomb,
}


def judge(mutant: Mutant) -> list[str]:
    """What should not be, of a mutant in the current folder; the folder is left with run.yaml alone."""
    Path("run.yaml").write_bytes(mutant.text.encode("utf-8", "surrogatepass"))
    return [
        fault
        for command in (["plan", "--json"], ["check"])
        for fault in judge_command(command, mutant.overrides, mutant.refused)
    ]


def judge_command(command: list[str], overrides: tuple[str, ...], refused: bool) -> Iterator[str]:
    """What should not be, of one command on run.yaml."""
    code, out, err, raised, seconds = run(
        [*command[:1], "run.yaml", "--", *overrides] if len(command) == 1 else [*command, "run.yaml", "--", *overrides]
    )
    if raised is not None:
        yield f"{command[0]}: traceback: {type(raised).__name__}: {raised!s:.200}"
        return
    if seconds >= SECONDS or code == 1:
        yield f"{command[0]}: {'hang' if code != 1 else 'exit 1'} after {seconds:.0f} s: {err[-300:]}"
    if refused and code == 0:
        yield f"{command[0]}: success, and it is wrong"
    if code == 0 and command[0] == "plan":
        try:
            json.loads(out)
        except ValueError as error:
            yield f"plan: the output is no JSON: {error}"
    for line in err.splitlines():
        if not line.startswith(("error: ", "config: ", "machine: ")):
            continue
        if "Fix: " not in line:
            yield f"{command[0]}: no fix: {line:.300}"
        if (line.startswith("error: ") and not PLACED.match(line)) or line.startswith("config: $."):
            yield f"{command[0]}: no place: {line:.300}"


_WHOLE = r"run\.yaml: (\$\.\w+: (this key is required|.*strategy_args says)|\S.* (files?|values|UTF-8))"
PLACED = re.compile(rf"error: (run\.yaml:\d+: |override |{_WHOLE}|[a-z]+ [a-z]+ 'mine' )")
"""A place in the file, the override, the file as a whole, or the plugin."""


def main_by_hand(count: int = 3000, seed: int = 0) -> int:
    """Judge `count` mutants, print every fault and a table; how many have one."""
    bad = dict.fromkeys(KINDS, 0)
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder, current(Path(folder)):
        for mutant in mutants(count, seed):
            began = time.monotonic()
            reset_registry()
            faults = judge(mutant)
            slowest = max(slowest, time.monotonic() - began)
            if faults:
                bad[mutant.kind] += 1
                print(f"--- {mutant.number} {mutant.kind} {mutant.overrides}\n" + "\n".join(faults), flush=True)
    print(
        f"{count} mutants, {sum(bad.values())} with faults, the slowest {slowest:.1f} s:",
        {k: n for k, n in bad.items() if n},
    )
    return sum(bad.values())


if __name__ == "__main__":
    sys.exit(1 if main_by_hand(*map(int, sys.argv[1:3])) else 0)
