"""A generated corpus: people with facts, each in a document of its own among text that says nothing; the same options
give the same corpus."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from attrs import frozen

from turnwise_retrieval.words import FILLER, RELATIONS, SYLLABLES, TEACHER

TOKENS = re.compile(r"\w+|[^\w\s]")
"""What the lengths count: words and marks."""


@frozen(eq=False)
class Corpus:
    """`names[i]` is the person of document i; `facts[i]` their values by relation, `teachers[i]` the document of their
    teacher.

    `index`: lower-case word → documents whose name, teacher or values hold it. `lengths[i]`: words and marks of
    document i.
    """

    seed: int
    names: tuple[str, ...]
    facts: tuple[Mapping[str, str], ...]
    teachers: tuple[int, ...]
    lengths: tuple[int, ...]
    index: Mapping[str, tuple[int, ...]]

    def search(self, query: str, count: int) -> list[int]:
        """The best `count` documents for the query's words: the sum of log(1 + documents ÷ documents with the word),
        ties by number.

        A document's own name counts twice. Documents without any of the words are not found; names, teachers and values
        are indexed, the rest of the text is not.
        """
        scores: dict[int, float] = {}
        # Sorted: a set of text has another order in each process, and a sum of floats depends on its order.
        for word in sorted(set(re.findall(r"[^\W\d_]+", query.lower()))):
            found = self.index.get(word, ())
            for document in found:
                times = 2 if self.names[document].lower() == word else 1
                scores[document] = scores.get(document, 0.0) + times * math.log(1 + len(self.names) / len(found))
        return sorted(scores, key=lambda document: (-scores[document], document))[:count]


@lru_cache(maxsize=16)
def make_corpus(seed: int, documents: int, shortest: int, longest: int) -> Corpus:
    """The corpus of these options. Lengths are drawn log-uniformly from [shortest, longest]: a long tail."""
    # With their number: a corpus of more documents is another one, not the same with some added.
    rng = np.random.default_rng([seed, documents])
    combined = [f"{a}{b}{c}".capitalize() for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]
    names = tuple(combined[i] for i in rng.choice(len(combined), documents, replace=False))
    facts = tuple(
        {key: relation.values[int(rng.integers(len(relation.values)))] for key, relation in RELATIONS.items()}
        for _ in names
    )
    # From 1 on: nobody is their own teacher.
    teachers = tuple(int((i + rng.integers(1, documents)) % documents) for i in range(documents))
    drawn = np.exp(rng.uniform(math.log(shortest), math.log(longest), documents)).round().astype(int)
    lengths = tuple(int(n) for n in drawn.clip(shortest, longest))
    index: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        for word in sorted({name.lower(), names[teachers[i]].lower(), *(value.lower() for value in facts[i].values())}):
            index.setdefault(word, []).append(i)
    return Corpus(seed, names, facts, teachers, lengths, {word: tuple(found) for word, found in index.items()})


@lru_cache(maxsize=1024)
def text_of(corpus: Corpus, document: int) -> str:
    """The text of a document, `lengths[document]` words and marks: the name as its title, then the facts scattered
    among filler sentences."""
    # A generator for each document, so that its text does not depend on which were asked for before.
    rng = np.random.default_rng([corpus.seed, 1, document])
    name = corpus.names[document]
    sentences = [
        relation.sentence.format(name=name, value=corpus.facts[document][key]) for key, relation in RELATIONS.items()
    ]
    sentences.append(TEACHER.format(name=name, value=corpus.names[corpus.teachers[document]]))
    left = corpus.lengths[document] - 1 - sum(len(TOKENS.findall(sentence)) for sentence in sentences)
    filler = []
    while left > 0:
        size = int(rng.integers(6, 16))
        # A rest of one or two would be too short for a sentence of its own.
        size = left if left - size < 3 else size
        words = rng.integers(len(FILLER), size=size - 1)
        filler.append(" ".join(FILLER[i] for i in words).capitalize() + ".")
        left -= size
    # From the last place to the first: an insertion does not move the places before it.
    places = np.sort(rng.integers(0, len(filler) + 1, len(sentences)))[::-1]
    for place, sentence in zip(places, [sentences[i] for i in rng.permutation(len(sentences))]):
        filler.insert(int(place), sentence)
    return f"{name}\n" + " ".join(filler)
