"""An episode as text for people."""

from __future__ import annotations

from typing import Any

from turnwise.data.trajectory import Trajectory


def readable(trajectory: Trajectory) -> str:
    """An episode for people: what was observed, said and earned, turn by turn."""
    lines = [f"=== {trajectory.tag}, task {trajectory.group}, member {trajectory.member}"]
    for number, turn in enumerate(trajectory.turns):
        lines += [
            f"--- turn {number}",
            _text(turn.observation),
            f"> {turn.text.strip()!r}" + (f" → {turn.action!r}" if turn.action != turn.text.strip() else ""),
        ]
        lines.append(f"reward {turn.reward:g}")
    success = {None: "", True: ", success", False: ", no success"}[trajectory.success]
    lines += [
        "--- end",
        _text(trajectory.final_observation),
        f"score {trajectory.score:g}, stopped by {trajectory.stop_reason}{success}\n",
    ]
    return "\n".join(lines)


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, dict):  # a message, or a part of one
        return _text(observation["content"]) if "content" in observation else str(observation.get("text", "[image]"))
    return "\n".join(_text(part) for part in observation or ())
