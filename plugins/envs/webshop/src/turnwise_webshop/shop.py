"""A catalogue with its search and its goals."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import bm25s
import numpy as np

from turnwise.errors import ConfigError
from turnwise_webshop.files import Asked, read
from turnwise_webshop.generated import catalogue
from turnwise_webshop.products import Goal, Product, words

PER_PAGE = 10
FOUND = 50
"""Products that a search finds at most, as in the original."""
_STEP = 10.0
_DRAWS = 1000


class Shop:
    """`products`: what is sold. `asked`: instructions of people, by ASIN ({}: goals are made from the products)."""

    def __init__(self, products: Sequence[Product], asked: Mapping[str, Sequence[Asked]]) -> None:
        self.products = tuple(products)
        self.by_asin = {product.asin: product for product in products}
        self._asked = [(self.by_asin[asin], one) for asin, some in asked.items() for one in some]
        self._index = bm25s.BM25(method="lucene")
        tokens = [words(product.text) for product in products]
        self._known = {word for some in tokens for word in some}
        self._index.index(tokens, show_progress=False)

    def search(self, query: str) -> list[str]:
        """ASINs of the products that hold any of the query's words, best first (BM25), ties in the catalogue's
        order."""
        asked = [word for word in words(query) if word in self._known]
        if not asked:
            return []
        scores = self._index.get_scores(asked)
        order = np.argsort(-scores, kind="stable")[:FOUND]
        return [self.products[i].asin for i in order if scores[i] > 0]

    def goal(self, rng: np.random.Generator, split: str) -> Goal:
        """The first goal of the generator that belongs to `split`. Raises ConfigError where there is none."""
        for _ in range(_DRAWS):
            drawn = self._of_people(rng) if self._asked else self._made(rng)
            if split in ("all", _split_of(drawn)):
                return drawn
        raise ConfigError(
            f"num_products: no goal of split {split!r} among {_DRAWS}, webshop. Fix: more products, or split: all."
        )

    def _made(self, rng: np.random.Generator) -> Goal:
        product = self.products[int(rng.integers(len(self.products)))]
        count = int(rng.integers(1, len(product.attributes) + 1)) if product.attributes else 0
        picked = sorted(rng.choice(len(product.attributes), count, replace=False)) if count else []
        attributes = tuple(product.attributes[i] for i in picked)
        options = {name: known[int(rng.integers(len(known)))] for name, known in product.options.items()}
        below = _above(product.price, rng)
        # By its kind and not by its title: the title would be the search.
        kind = ", ".join([*attributes[:-1], f"{attributes[-1]} {product.query}"] if attributes else [product.query])
        wanted = "".join(f", {name}: {value}" for name, value in options.items())
        text = f"Find me {kind}{wanted}, and price lower than {below:.2f} dollars"
        return Goal(product, text, attributes, options, below)

    def _of_people(self, rng: np.random.Generator) -> Goal:
        product, asked = self._asked[int(rng.integers(len(self._asked)))]
        below = _above(product.price, rng)
        text = f"{asked.instruction.rstrip('.')}, and price lower than {below:.2f} dollars"
        return Goal(product, text, asked.attributes, asked.options, below)


@lru_cache(maxsize=8)
def shop(path: str | None, count: int | None, seed: int, human: bool) -> Shop:
    """The shop of these options, one for all environments of a process."""
    if path is None:
        return Shop(catalogue(seed, count or 1000), {})
    products, asked = read(path, count, human)
    return Shop(products, asked)


def _above(price: float, rng: np.random.Generator) -> float:
    """One of the four next tens above a price."""
    return (price // _STEP + 1 + int(rng.integers(4))) * _STEP


def _split_of(goal: Goal) -> str:
    """A fifth `test`, a tenth `val`, the rest `train`, by what is asked for but the price, which is drawn anew."""
    content = "|".join([goal.product.asin, *goal.attributes, *(f"{k}={v}" for k, v in sorted(goal.options.items()))])
    share = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64
    return "test" if share < 0.2 else "val" if share < 0.3 else "train"
