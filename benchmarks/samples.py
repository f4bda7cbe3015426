"""Trajectory-wise, step-wise and merged samples of the same episodes: how many, how long, and what an update over them
takes.

    python benchmarks/samples.py [--episodes 32] [--longest 2000] [--hops 3]

A player that reads the documents answers questions of the retrieval environment, thinking before every action. The
episodes are played under a chat template that keeps what was said and under one that leaves the thinking out of earlier
turns, as many do. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from turnwise.contracts.chat import Chat, Message, ModelSourceContext
from turnwise.contracts.env_manager import Episode, Limits, ManagerContext
from turnwise.contracts.environment import Response
from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data import Batch, Generation, Trajectory, build_batch
from turnwise.data.microbatches import cut
from turnwise.data.rows import Update, rows_of
from turnwise_hf.source import HfModelSource
from turnwise_managers.config import StepwiseConfig, TrajectoryConfig
from turnwise_managers.stepwise import StepwiseManager
from turnwise_managers.trajectory import TrajectoryManager
from turnwise_retrieval.corpus import text_of
from turnwise_retrieval.retrieval import Retrieval
from turnwise_torch.strategy import TorchStrategy

ROWS = 4
THOUGHT = "<think> I read what is shown and follow the teachers until the fact that was asked for </think>"
KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = KEEPS.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
)
FACTS = {
    "born": r"{} was born in (\w+)\.",
    "work": r"{} works as a (\w+)\.",
    "favourite colour": r"The favourite colour of {} is (\w+)\.",
    "play": r"{} plays the (\w+)\.",
}


class Environment:
    """One episode's environment as a manager sees it; `shown` is what it showed last."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self.inner, self.seed, self.shown = Retrieval(**options), seed, ""

    async def reset(self) -> tuple[str, dict[str, Any]]:
        """Ask the question of the seed."""
        self.shown, info = self.inner.reset(seed=self.seed)
        return self.shown, info

    async def step(
        self, action: str, response: Response | None = None
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Search or answer."""
        answer = self.inner.step(action)
        self.shown = answer[0]
        return answer


class Reader:
    """A sampler that thinks, then does what the shown document says: every manager plays the same episode with it."""

    input = "ids"

    def __init__(self, chat: Chat, environment: Environment) -> None:
        self.chat, self.environment = chat, environment
        self.name, self.left = "", 0

    def action(self) -> str:
        """Search for the person of the question, then from teacher to teacher, then answer."""
        question, shown = self.environment.inner.text, self.environment.shown
        if not self.name:
            self.name, self.left = re.findall(r"[A-Z]\w+", question)[-1], question.count("the teacher of ")
            return f"search: {self.name}"
        if self.left:
            self.name, self.left = re.findall(rf"The teacher of {self.name} is (\w+)\.", shown)[0], self.left - 1
            return f"search: {self.name}"
        pattern = next(pattern for word, pattern in FACTS.items() if word in question)
        return f"answer: {re.findall(pattern.format(self.name), shown)[0]}"

    async def generate(self, *, turn: int, ids: np.ndarray | None = None, max_new_tokens: int, **_: Any) -> Generation:
        """The response in tokens, closed by the stop token; the log-probs mean nothing here."""
        assert ids is not None
        written = np.concatenate(
            [self.chat.continue_text(ids, f"{THOUGHT} {self.action()}"), self.chat.stop_ids[:1]]
        ).astype(np.int32)
        assert len(written) <= max_new_tokens
        zeros = np.zeros(len(written))
        return Generation(self.chat.decode(written), written, zeros.astype(np.float32), zeros.astype(np.int32), "stop")


def managers() -> dict[str, TrajectoryManager | StepwiseManager]:
    """The ways to cut samples, by the name in the table."""
    pattern, context = {"action_pattern": r"</think>\s*(.*)"}, ManagerContext("Retrieval", 10)
    return {
        "trajectory-wise": TrajectoryManager(TrajectoryConfig(**pattern), context),
        "step-wise": StepwiseManager(StepwiseConfig(**pattern), context),
        "step-wise, merged": StepwiseManager(StepwiseConfig(merge_steps=True, **pattern), context),
        "step-wise, `history_length: 1`": StepwiseManager(StepwiseConfig(history_length=1, **pattern), context),
    }


def play(
    manager: TrajectoryManager | StepwiseManager, chat: Chat, options: dict[str, Any], episodes: int
) -> list[Trajectory]:
    """The episodes of seeds 0…n−1; each ends with the right answer."""
    limits = Limits(sequence_length=2**20, max_new_tokens=200, max_tokens_per_step=200, max_turns=10)
    out = []
    for seed in range(episodes):
        environment = Environment(options, seed)
        episode = Episode(environment, chat, limits, "Retrieval", seed, 0, 0, seed)
        out.append(asyncio.run(manager.run(episode, Reader(chat, environment))))
        assert out[-1].success
    return out


def model(folder: Path, options: dict[str, Any], template: str) -> tuple[Path, Chat]:
    """A tiny model whose tokenizer knows every word of the corpus, with this chat template."""

    def texts() -> list[Message]:
        environment = Retrieval(**options)
        corpus = environment.corpus
        shown = [text_of(corpus, document) for document in range(len(corpus.names))]
        shown += [environment.reset(seed=seed)[0] for seed in range(200)] + ["Right."]
        said = [
            THOUGHT,
            *(f" {kind}: {word}" for kind in ("search", "answer") for word in corpus.index),
            *(f" {name}" for name in corpus.names),
        ]
        return [
            *({"role": "user", "content": text} for text in shown),
            *({"role": "assistant", "content": text} for text in said),
        ]

    source = HfModelSource(None, ModelSourceContext(cache=folder, texts=texts))
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 65536}
    made = source.prepare({"recipe": {**sizes, "tokenizer": "word", "chat_template": template}})
    return made, source.chat(made)


@frozen
class Cost:
    """One line of the table; `padded`: the rows of all micro-batches times their widths."""

    samples: int
    tokens: int
    padded: int
    longest: int
    seconds: float
    gradient: float


def cost(batch: Batch, folder: Path, repeats: int) -> Cost:
    """What an update over all samples costs, at learning rate 0: micro-batches of `ROWS` samples of similar length, the
    least of `repeats` runs."""
    context = TrainContext(
        model=folder,
        role="actor_train",
        dtype="fp32",
        objective=Objective(LossChoice("vanilla")),
        per_device_train_batch_size=ROWS,
        max_grad_norm=0.0,
    )
    strategy = TorchStrategy(None, context)
    rows = rows_of(batch)
    sampled = len(batch.sampled)
    weight = np.ones(sampled)
    columns = {
        **rows.columns,
        "coef": weight / sampled,
        "weight": weight,
        "advantages": weight,
        "old_log_probs": np.full(sampled, np.nan, np.float32),
    }
    update, seconds, gradient = Update(evolve(rows, columns=columns), lr=0.0), float("inf"), 0.0
    for _ in range(repeats):
        began = time.process_time()
        gradient = strategy.update(update).grad_norm
        seconds = min(seconds, time.process_time() - began)
    strategy.close()
    lengths = batch.samples["length"]
    padded = sum(len(group) * int(lengths[group].max()) for group in cut(lengths, ROWS))
    return Cost(len(lengths), int(lengths.sum()), padded, int(lengths.max()), seconds, gradient)


def table(template: str, options: dict[str, Any], episodes: int, repeats: int) -> str:
    """Markdown of all ways to cut under one chat template."""
    lines = [
        "| samples of | samples | tokens | padded tokens | longest | update CPU s | gradient norm |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    said: Sequence[list[str]] | None = None
    with tempfile.TemporaryDirectory() as temporary:
        folder, chat = model(Path(temporary), options, template)
        for name, manager in managers().items():
            played = play(manager, chat, options, episodes)
            actions = [[turn.action for turn in trajectory.turns] for trajectory in played]
            assert said is None or actions == said
            said = actions
            c = cost(build_batch(played, [manager.samples(trajectory) for trajectory in played]), folder, repeats)
            lines.append(
                f"| {name} | {c.samples:,} | {c.tokens:,} | {c.padded:,} | {c.longest:,} | {c.seconds:.1f} |"
                f" {c.gradient:.6f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    options = {"num_documents": 100, "document_tokens": [100, asked.longest], "hops": asked.hops}
    print(f"{asked.episodes} episodes of {asked.hops + 1} turns, documents of 100 to {asked.longest:,} tokens,")
    print(f"{ROWS} samples a micro-batch, one CPU thread.")
    for title, template in (
        ("The template keeps what was said", KEEPS),
        ("The template leaves thinking out of earlier turns", STRIPS),
    ):
        print(f"\n{title}:\n\n{table(template, options, asked.episodes, asked.repeats)}")


if __name__ == "__main__":
    main()
