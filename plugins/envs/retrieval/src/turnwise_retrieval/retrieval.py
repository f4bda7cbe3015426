"""Questions over a generated corpus: search for documents, follow the teachers, answer by exact match."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise_retrieval import options as check
from turnwise_retrieval.corpus import make_corpus, text_of
from turnwise_retrieval.words import RELATIONS, THE_TEACHER_OF

SPLITS = ("all", "train", "val", "test")
FREE_TEXT = ("invalid", "search")
# DOTALL: an answer may go over several lines, and `normalised` makes spaces of their ends.
_ACTION = re.compile(r"\s*(search|answer)\s*:(.*)", re.IGNORECASE | re.DOTALL)
# Draws until a split that the corpus cannot fill is reported.
_DRAWS = 1000
# Characters of a document, which may be long.
_RENDERED = 400


@frozen
class Question:
    """`chain`: the documents from the named person to the one whose fact answers; `relation`: which fact."""

    chain: tuple[int, ...]
    relation: str


class Retrieval:
    """The environment `retrieval`; its options are described in the README. Raises ConfigError for options that cannot
    be used.

    `corpus`: the documents, shared by all instances with these options."""

    def __init__(
        self,
        num_documents: int = 200,
        document_tokens: Sequence[int] = (100, 5000),
        corpus_seed: int = 0,
        hops: int = 2,
        documents_per_search: int = 1,
        free_text: str = "invalid",
        search_penalty: float = 0.0,
        invalid_penalty: float = 0.0,
        wrong_penalty: float = 0.0,
        split: str = "all",
    ) -> None:
        documents = check.integer("num_documents", num_documents, 2, 8000)
        shortest, longest = check.lengths(document_tokens)
        self.corpus = make_corpus(check.integer("corpus_seed", corpus_seed, 0, 2**63 - 1), documents, shortest, longest)
        self._hops = check.integer("hops", hops, 1, 5)
        self._per_search = check.integer("documents_per_search", documents_per_search, 1, documents)
        self._free_text = check.choice("free_text", free_text, FREE_TEXT)
        self._search_penalty = check.penalty("search_penalty", search_penalty)
        self._invalid_penalty = check.penalty("invalid_penalty", invalid_penalty)
        self._wrong_penalty = check.penalty("wrong_penalty", wrong_penalty)
        self._split = check.choice("split", split, SPLITS)
        self._question: Question | None = None
        self._observation = ""
        self._shown: tuple[int, ...] = ()
        self._known: list[int] = []
        self._seen: set[int] = set()
        self._searches = 0
        self._over = self._success = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask the question of `seed`; without a seed, a random one. `options` are not used."""
        question = self._question = self._drawn(secrets.randbits(63) if seed is None else int(seed))
        self._observation, self._shown, self._known = f"Question: {self.text}", (), [question.chain[0]]
        self._seen, self._searches, self._over, self._success = set(), 0, False, False
        return self._observation, {**self._info(question, False), "env_instruction": self.instruction}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """`search: WORDS` shows the best documents, `answer: WORDS` ends the episode; case and white space around do
        not matter.

        Raises EnvironmentFailure before the first reset. After the end every step returns the final observation with
        reward 0.
        """
        question = self._question
        if question is None:
            raise EnvironmentFailure("retrieval.step was called before reset. Fix: call reset first.")
        if self._over:
            return self._observation, 0.0, True, False, self._info(question, False)
        match = _ACTION.match(action)
        kind, words = (
            (match[1].lower(), match[2])
            if match
            else ("search" if self._free_text == "search" and action.strip() else "", action)
        )
        if kind == "answer":
            self._over, self._success = True, normalised(words) == normalised(self.answer)
            self._observation = "Right." if self._success else "Wrong."
            return (
                self._observation,
                1.0 if self._success else self._wrong_penalty,
                True,
                False,
                self._info(question, False),
            )
        if kind == "search":
            self._searches += 1
            self._show(self.corpus.search(words, self._per_search))
            return self._observation, self._search_penalty, False, False, self._info(question, False)
        self._observation = "Invalid. Write search: WORDS or answer: WORDS."
        return self._observation, self._invalid_penalty, False, False, self._info(question, True)

    @property
    def text(self) -> str:
        """The question in words."""
        question = self._asked()
        who = self.corpus.names[question.chain[0]]
        for _ in question.chain[1:]:
            who = THE_TEACHER_OF.format(who=who)
        return RELATIONS[question.relation].question.format(who=who)

    @property
    def answer(self) -> str:
        """The right answer."""
        question = self._asked()
        return self.corpus.facts[question.chain[-1]][question.relation]

    @property
    def instruction(self) -> str:
        """The rules and the actions, for a system prompt."""
        return (
            "Answer the question. Every person has a document, which names their teacher. "
            "Your actions: search: WORDS (shows the best documents for these words), answer: WORDS (ends the task)."
        )

    def render(self) -> str:
        """The question, and the beginning of what is on show. Raises EnvironmentFailure before the first reset."""
        return f"{self.text}\n\n{self._observation[:_RENDERED]}"

    def close(self) -> None:
        """Nothing is held; may be called twice."""

    def _asked(self) -> Question:
        if self._question is None:
            raise EnvironmentFailure("retrieval has no question before reset. Fix: call reset first.")
        return self._question

    def _drawn(self, seed: int) -> Question:
        """The first question of the seed's generator that belongs to the split."""
        # A SeedSequence takes no negative number, and −1 and 1 are two seeds.
        rng = np.random.default_rng([abs(seed), int(seed < 0)])
        for _ in range(_DRAWS):
            chain = [int(rng.integers(len(self.corpus.names)))]
            while len(chain) < self._hops:
                chain.append(self.corpus.teachers[chain[-1]])
            question = Question(tuple(chain), list(RELATIONS)[int(rng.integers(len(RELATIONS)))])
            # By content, not by seed: two seeds may draw the same question, which must not train and test at once.
            if self._split in ("all", self._split_of(question)):
                return question
        raise ConfigError(
            f"num_documents: no question of split {self._split!r} among {_DRAWS}, retrieval. Fix: more documents."
        )

    def _split_of(self, question: Question) -> str:
        """A fifth `test`, a tenth `val`, the rest `train`, by the content of the question."""
        content = f"{self.corpus.names[question.chain[0]]} {len(question.chain)} {question.relation}"
        share = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64
        return "test" if share < 0.2 else "val" if share < 0.3 else "train"

    def _show(self, documents: list[int]) -> None:
        self._shown = tuple(documents)
        self._seen.update(documents)
        for document in documents:
            # Whoever has been read about may be searched for: the legal actions give away no other name.
            self._known += [one for one in (document, self.corpus.teachers[document]) if one not in self._known]
        self._observation = "\n\n".join(text_of(self.corpus, document) for document in documents) or "Nothing found."

    def _info(self, question: Question, invalid: bool) -> dict[str, Any]:
        values = RELATIONS[question.relation].values
        return {
            "state_key": (*question.chain, question.relation, *self._shown, self._over),
            "success": self._success,
            "answer": f"answer: {self.answer}",
            "actions": [
                *(f"search: {self.corpus.names[i]}" for i in self._known),
                *(f"answer: {value}" for value in values),
            ],
            "metrics": {
                "searches": float(self._searches),
                "invalid": float(invalid),
                "found": float(question.chain[-1] in self._seen),
            },
        }


def normalised(answer: str) -> str:
    """The words and numbers of an answer in lower case, with one space between: marks and white space do not count."""
    return " ".join(re.findall(r"\w+", answer.lower()))
