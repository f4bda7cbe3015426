"""The study's pages: what the finished runs' lines say, as Markdown tables and pictures. Nothing here is typed in by
hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study_runs import ESTIMATORS, MANAGERS, by_combination

Line = Mapping[str, Any]
LEVELS = 512
REACHED = 0.5
NAMES = {"trajectory": "trajectory", "stepwise": "stepwise", "merged": "stepwise, merged"}
COLOURS = {"grpo": "tab:blue", "gigpo": "tab:orange", "gae": "tab:green", "reinforce_plus_plus": "tab:red"}
PAGES = {
    "frozen_lake": ("study.md", "FrozenLake: every cut and every estimator"),
    "sokoban": ("sokoban.md", "Sokoban: two cuts, two estimators"),
}
BEGIN, END = "<!-- written by benchmarks/study.py: {} -->\n", "<!-- end of {} -->\n"


def write(lines: Sequence[Line], results: Path, images: Path) -> None:
    """The tables under `results`, the pictures under `images`, and the tables again in `images`/../learning.md between
    its marks."""
    results.mkdir(parents=True, exist_ok=True)
    images.mkdir(parents=True, exist_ok=True)
    texts = {"frozen_lake": lake_tables(lines), "sokoban": sokoban_table(lines)}
    for env, (name, title) in PAGES.items():
        if any(line["env"] == env for line in lines):
            head = (
                f"# {title}\n\n`make study ARGS=--write`; what the numbers mean:"
                " [learning](../../docs/learning.md).\n\n"
            )
            (results / name).write_text(head + texts[env], encoding="utf-8")
            into(images.parent / "learning.md", env, texts[env])
    draw(lines, images)


def into(page: Path, mark: str, text: str) -> None:
    """Replace what stands between the marks of `mark` on a page; raises ValueError where the marks are missing."""
    content = page.read_text(encoding="utf-8")
    head, begin, rest = content.partition(BEGIN.format(mark))
    _, end, tail = rest.partition(END.format(mark))
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.format(mark).strip()!r} and {END.format(mark).strip()!r}")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


# ---- FrozenLake


def lake_tables(lines: Iterable[Line]) -> str:
    """Success of every combination and seed, then what each used."""
    lines = [line for line in lines if line["env"] == "frozen_lake"]
    found = by_combination(lines, "frozen_lake")
    seeds = sorted({line["seed"] for line in lines})
    players = next((line["players"] for line in lines if line["players"]), {})
    bar = players.get("random")
    parts = [budget(lines, "maps"), ""]
    parts += [
        f"| samples | estimator | {' | '.join(f'seed {s}' for s in seeds)} | mean | untrained | seeds above random"
        " play |"
    ]
    parts += [f"|---|---|{'---:|' * (len(seeds) + 3)}"]
    for manager, estimator in _ordered(found):
        of = {line["seed"]: line for line in found[manager, estimator]}
        cells = [f"{final(of[s]):.3f}" if s in of else "–" for s in seeds]
        above = (
            "–" if bar is None else f"{sum(errors_above(final(line), bar) >= 2 for line in of.values())} of {len(of)}"
        )
        mean, before = statistics.mean(map(final, of.values())), statistics.mean(map(untrained, of.values()))
        parts.append(
            f"| {NAMES[manager]} | `{estimator}` | {' | '.join(cells)} | {mean:.3f} | {before:.3f} | {above} |"
        )
    if players:
        parts += [
            "",
            "| player without a model | success |",
            "|---|---:|",
            *(f"| {name} | {value:.3f} |" for name, value in players.items()),
        ]
    parts += ["", "What a run used, means over the seeds:", "", *usage(found)]
    parts += [
        "",
        f"Training trajectories until success in training (sampled, mean of five steps) first reached {REACHED}:",
        "",
        *reached(found, seeds),
    ]
    return "\n".join(parts) + "\n"


def usage(found: Mapping[tuple[str, str], Sequence[Line]]) -> list[str]:
    """Samples, tokens and time of every combination."""
    parts = [
        (
            "| samples | estimator | turns each, at the end | samples each | samples each, at the end | million tokens"
            " | CPU s | wall s |"
        ),
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key in _ordered(found):
        of = found[key]
        each = statistics.mean(line["samples"] / line["trajectories"] for line in of)
        parts.append(
            f"| {NAMES[key[0]]} | `{key[1]}` | {_mean(of, 'last_turns'):.2f} | {each:.2f} |"
            f" {_mean(of, 'last_samples'):.2f} | {_mean(of, 'tokens') / 1e6:.2f} | {_mean(of, 'cpu'):.0f} |"
            f" {_mean(of, 'wall'):.0f} |"
        )
    machines = sorted({line["machine"] for of in found.values() for line in of})
    return [
        *parts,
        "",
        (
            f"Each: per trajectory; at the end: the last tenth of the steps. Machine: {'; '.join(machines)}, no GPU,"
            " one run at a time."
        ),
    ]


def reached(found: Mapping[tuple[str, str], Sequence[Line]], seeds: Sequence[int]) -> list[str]:
    """How soon GRPO and GiGPO began to succeed, every seed for itself."""
    parts = [f"| samples | estimator | {' | '.join(f'seed {s}' for s in seeds)} |", f"|---|---|{'---:|' * len(seeds)}"]
    for key in _ordered(found):
        if key[1] in ("grpo", "gigpo"):
            firsts = {
                line["seed"]: next((x for x, y in zip(*curve(line, "training")) if y >= REACHED), None)
                for line in found[key]
            }
            cells = ["–" if s not in firsts else "never" if firsts[s] is None else f"{firsts[s]:,.0f}" for s in seeds]
            parts.append(f"| {NAMES[key[0]]} | `{key[1]}` | {' | '.join(cells)} |")
    return parts


# ---- Sokoban


def sokoban_table(lines: Iterable[Line]) -> str:
    """Success before and after, and how many standard errors lie between them."""
    lines = [line for line in lines if line["env"] == "sokoban"]
    if not lines:
        return ""
    found = by_combination(lines, "sokoban")
    players = next((line["players"] for line in lines if line["players"]), {})
    bar = players.get("random")
    parts = [
        budget(lines, "rooms"),
        "",
        (
            "| samples | estimator | seed | untrained | trained | difference in standard errors | against random play |"
            " CPU s | wall s |"
        ),
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for manager, estimator in _ordered(found):
        for line in found[manager, estimator]:
            before, after = untrained(line), final(line)
            against = "–" if bar is None else f"{errors_above(after, bar):+.1f}"
            parts.append(
                f"| {NAMES[manager]} | `{estimator}` | {line['seed']} | {before:.3f} | {after:.3f} |"
                f" {errors_above(after, before):+.1f} | {against} | {line['cpu']:.0f} | {line['wall']:.0f} |"
            )
    if players:
        parts += [
            "",
            "| player without a model | success |",
            "|---|---:|",
            *(f"| {name} | {value:.3f} |" for name, value in players.items()),
        ]
    return "\n".join(parts) + "\n"


# ---- numbers


def final(line: Line) -> float:
    """Greedy success of the trained model."""
    return float(line["evals"][-1][1])


def untrained(line: Line) -> float:
    """Greedy success before the first step."""
    return float(line["evals"][0][1])


def errors_above(share: float, other: float, count: int = LEVELS) -> float:
    """By how many standard errors one share of `count` lies above another of as many (two proportions, not pooled, not
    paired)."""
    error = math.sqrt((share * (1 - share) + other * (1 - other)) / count)
    if error == 0.0:
        return 0.0 if share == other else math.copysign(math.inf, share - other)
    return (share - other) / error


def budget(lines: Sequence[Line], levels: str) -> str:
    """What was measured, after how much training."""
    trajectories, steps = _only(lines, "trajectories"), _only(lines, "steps")
    return (
        f"Greedy success on {LEVELS} held-out {levels} after {trajectories:,.0f} training trajectories ({steps:.0f}"
        " steps)."
    )


def _mean(lines: Iterable[Line], name: str) -> float:
    return statistics.mean(float(line[name]) for line in lines)


def _only(lines: Iterable[Line], name: str) -> float:
    """The one value that all lines agree on; raises ValueError where they do not: such runs are no comparison."""
    values = {float(line[name]) for line in lines}
    if len(values) != 1:
        raise ValueError(f"runs of one table differ in {name}: {sorted(values)}")
    return values.pop()


def _ordered(found: Mapping[tuple[str, str], Any]) -> list[tuple[str, str]]:
    return sorted(found, key=lambda key: (MANAGERS.index(key[0]), ESTIMATORS.index(key[1])))


# ---- pictures


def draw(lines: Sequence[Line], images: Path) -> None:
    """study.png: all estimators; study_gigpo.png: GiGPO against GRPO; one panel a cut, held-out success over
    trajectories."""
    found = by_combination(lines, "frozen_lake")
    if found:
        panels(found, ESTIMATORS, "evals", images / "study.png")
        panels(found, ("grpo", "gigpo"), "both", images / "study_gigpo.png")


def panels(found: Mapping[tuple[str, str], Sequence[Line]], estimators: Sequence[str], rows: str, path: Path) -> None:
    """Thin lines are seeds, thick ones their mean. `rows`: `evals`, or `both`: success in training below (mean of five
    steps)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = ("evals", "training") if rows == "both" else ("evals",)
    figure = Figure(figsize=(11, 3.1 * len(kinds) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(kinds), len(MANAGERS), sharex=True, sharey=True, squeeze=False)
    for row, kind in enumerate(kinds):
        for column, manager in enumerate(MANAGERS):
            panel = axes[row][column]
            for estimator in estimators:
                curves = [curve(line, kind) for line in found.get((manager, estimator), ())]
                for x, y in curves:
                    panel.plot(x, y, color=COLOURS[estimator], linewidth=0.7, alpha=0.5)
                if curves:
                    means = [statistics.mean(values) for values in zip(*(y for _, y in curves), strict=True)]
                    panel.plot(
                        curves[0][0],
                        means,
                        color=COLOURS[estimator],
                        linewidth=2.2,
                        label=f"{estimator}, {len(curves)} seed{'s' * (len(curves) > 1)}",
                    )
            panel.set_title(NAMES[manager] if row == 0 else "")
            panel.grid(alpha=0.3)
            panel.set_ylim(-0.02, 1)
            if row == len(kinds) - 1:
                panel.set_xlabel("training trajectories")
        axes[row][0].set_ylabel("held-out success, greedy" if kind == "evals" else "training success, sampled")
    axes[0][0].legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def curve(line: Line, kind: str) -> tuple[list[float], list[float]]:
    """(trajectories, success) of one run's evaluations, or of its training steps, each the mean of the last five."""
    each = line["trajectories"] / line["steps"]
    if kind == "evals":
        return [step * each for step, *_ in line["evals"]], [success for _, success, *_ in line["evals"]]
    shares = line["training"]
    return [(i + 1) * each for i in range(len(shares))], [
        statistics.mean(shares[max(0, i - 4) : i + 1]) for i in range(len(shares))
    ]
