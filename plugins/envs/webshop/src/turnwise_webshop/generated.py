"""A generated catalogue: the same seed and number of products give the same one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import frozen

from turnwise_webshop.products import Product

COLORS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "silver", "white", "yellow")
_MAKERS = ("arlo", "benvale", "cordia", "dunmore", "elvar", "fenwick", "galdor", "hollin", "ivera", "jorvik")


@frozen
class _Kind:
    """Things of one category: what they are called, what they can be, which options they have beside the colour."""

    category: str
    things: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[float, float]


_SIZES = {"size": ("small", "medium", "large", "x-large")}
_KINDS = (
    _Kind(
        "clothing",
        ("jacket", "shirt", "trousers", "hoodie", "dress", "scarf", "sweater", "socks"),
        ("cotton", "machine wash", "long sleeve", "waterproof", "slim fit", "wool", "breathable", "quick drying"),
        _SIZES,
        (12, 120),
    ),
    _Kind(
        "shoes",
        ("sneakers", "boots", "sandals", "slippers", "loafers"),
        ("rubber sole", "leather", "memory foam", "waterproof", "arch support", "non slip"),
        {"size": ("6", "7", "8", "9", "10", "11")},
        (20, 160),
    ),
    _Kind(
        "furniture",
        ("bookcase", "chair", "desk", "nightstand", "sofa", "table"),
        ("solid wood", "easy assembly", "storage space", "space saving", "steel frame", "scratch resistant"),
        {"size": ("narrow", "wide")},
        (60, 600),
    ),
    _Kind(
        "kitchen",
        ("kettle", "pan", "knife", "teapot", "blender", "toaster"),
        ("stainless steel", "dishwasher safe", "non stick", "cordless", "heat resistant", "bpa free"),
        {"capacity": ("one litre", "two litres", "three litres")},
        (10, 140),
    ),
    _Kind(
        "electronics",
        ("headphones", "speaker", "charger", "keyboard", "camera", "monitor", "tripod"),
        ("wireless", "fast charging", "noise cancelling", "long battery life", "water resistant", "plug and play"),
        {"style": ("single", "bundle")},
        (15, 400),
    ),
)


def catalogue(seed: int, count: int) -> tuple[Product, ...]:
    """`count` products of different titles and numbers."""
    # With their number: more products are another catalogue, not the same with some added.
    rng = np.random.default_rng([seed, count])
    return tuple(_product(rng, number) for number in range(count))


def _product(rng: np.random.Generator, number: int) -> Product:
    kind = _KINDS[int(rng.integers(len(_KINDS)))]
    thing = kind.things[int(rng.integers(len(kind.things)))]
    picked = rng.choice(len(kind.attributes), int(rng.integers(2, 4)), replace=False)
    attributes = tuple(kind.attributes[i] for i in sorted(picked))
    maker = _MAKERS[int(rng.integers(len(_MAKERS)))]
    colors = rng.choice(len(COLORS), int(rng.integers(2, 5)), replace=False)
    options = {"color": tuple(COLORS[i] for i in sorted(colors))} | dict(kind.options)
    price = round(float(rng.uniform(*kind.prices)), 2)
    # The number of the model makes each title one of its own.
    title = f"{maker} {' '.join(attributes[:2])} {thing} model {number}"
    return Product(
        asin=f"B{number:09d}",
        title=title,
        category=(kind.category, thing),
        query=thing,
        attributes=attributes,
        options=options,
        price=price,
        description=f"A {thing} by {maker}.",
        bullets=tuple(f"{attribute}." for attribute in attributes),
    )
