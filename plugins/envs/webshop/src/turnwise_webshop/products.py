"""What a shop sells and what a customer asks for: products, goals, and the published reward of a purchase."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen


@frozen(eq=False)
class Product:
    """One product of a catalogue.

    `category`: from the widest to the narrowest; `query`: the words under which the catalogue's makers found it. Of
    `attributes` a goal names some; `options`: name → the values to choose from. `price` in dollars."""

    asin: str
    title: str
    category: tuple[str, ...]
    query: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    description: str = ""
    bullets: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What the search indexes."""
        values = (value for known in self.options.values() for value in known)
        return " ".join([self.title, *self.category, self.description, *self.bullets, *values])


@frozen
class Goal:
    """What an instruction asks for: `product` with some of its attributes, one value of each option, for less than
    `price_below` dollars."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_below: float


def words(text: str) -> list[str]:
    """The words and numbers of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def reward(goal: Goal, bought: Product, chosen: Mapping[str, str]) -> float:
    """The reward of a purchase, 0 to 1 (WebShop, arXiv 2207.01206, section 3): r_type times the share of attributes,
    options and the price that are as asked.

    `chosen`: option name → the value chosen. Words are compared as they are, where the original matches them fuzzily
    and takes the nouns of titles alone."""
    about = " ".join(words(" ".join([bought.title, bought.description, *bought.bullets])))
    has = {" ".join(words(attribute)) for attribute in bought.attributes}
    wanted = [" ".join(words(attribute)) for attribute in goal.attributes]
    attributes = sum(attribute in has or f" {attribute} " in f" {about} " for attribute in wanted)
    values = {" ".join(words(value)) for value in chosen.values()}
    options = sum(" ".join(words(value)) in values for value in goal.options.values())
    met = attributes + options + (bought.price <= goal.price_below)
    return _type_share(goal.product, bought) * met / (len(goal.attributes) + len(goal.options) + 1)


def _type_share(asked: Product, bought: Product) -> float:
    """r_type: 1 for the same kind of thing, less where title, query and category say that it is another."""
    title = set(words(asked.title))
    overlap = len(title & set(words(bought.title))) / max(1, len(title))
    category = len(set(asked.category) & set(bought.category)) >= 2
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    return 1.0 if overlap > 0.2 or asked.query == bought.query or category else 0.5
