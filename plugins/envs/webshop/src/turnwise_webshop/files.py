"""WebShop's own catalogue, as its authors give it out: `items_shuffle*.json`, `items_ins*.json` and
`items_human_ins.json` in one folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.errors import ConfigError
from turnwise_webshop.products import Product

_NO_PRICE = 100.0
"""What the original takes for a product without a price."""


@frozen
class Asked:
    """What a person wrote for a product, and what of it is checked."""

    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]


def read(path: str, count: int | None, human: bool) -> tuple[list[Product], dict[str, list[Asked]]]:
    """The first `count` products (None: all) and, with `human`, what people ask for among them. Raises ConfigError for
    files that are not there or not as the original's."""
    folder = Path(path).expanduser()
    items = _json(_one(folder, "items_shuffle*.json"), list)
    made = _json(_one(folder, "items_ins*.json"), dict)
    products: dict[str, Product] = {}
    people = _json(_one(folder, "items_human_ins.json"), dict) if human else {}
    try:
        for item in items:
            if count is not None and len(products) == count:
                break
            product = _product(item, made)
            products.setdefault(product.asin, product)
        asked = _asked(people, products)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"data_path: an entry of {folder} cannot be read ({error!r:.200}), webshop. Fix: the files of WebShop, as its"
            " authors give them out."
        ) from error
    if not products:
        raise ConfigError(f"data_path: {folder} holds no product, webshop. Fix: the files of WebShop.")
    if human and not asked:
        raise ConfigError(
            f"human_goals: nobody asks for any of the {len(products)} products, webshop. Fix: more num_products, or"
            " human_goals: false."
        )
    return list(products.values()), asked


def _product(item: Mapping[str, Any], made: Mapping[str, Any]) -> Product:
    asin = str(item["asin"])
    options = {
        str(name).lower(): tuple(str(value["value"]).strip().lower() for value in values)
        for name, values in (item.get("customization_options") or {}).items()
        if values
    }
    prices = [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*\.?\d*", str(item.get("pricing") or ""))]
    attributes = made.get(asin, {}).get("attributes") or ()
    return Product(
        asin=asin,
        title=str(item["name"]),
        category=tuple(part.strip() for part in str(item.get("product_category") or "").split("›") if part.strip()),
        query=str(item.get("query") or item["name"]).lower(),
        attributes=tuple(str(attribute).lower() for attribute in attributes),
        options=options,
        price=prices[0] if prices else _NO_PRICE,
        description=str(item.get("full_description") or ""),
        bullets=tuple(str(line) for line in item.get("small_description") or ()),
    )


def _asked(people: Mapping[str, Any], products: Mapping[str, Product]) -> dict[str, list[Asked]]:
    """What people wrote for these products; what names no attribute checks nothing and is left out, as there."""
    found: dict[str, list[Asked]] = {}
    for asin, entries in people.items():
        product = products.get(asin)
        if product is None:
            continue
        for entry in entries:
            attributes = tuple(str(one).lower() for one in entry.get("instruction_attributes") or ())
            values = [str(value).strip().lower() for value in entry.get("instruction_options") or ()]
            if attributes:
                options = {_name_of(product, value): value for value in values}
                found.setdefault(asin, []).append(Asked(str(entry["instruction"]), attributes, options))
    return found


def _name_of(product: Product, value: str) -> str:
    """Which option a value belongs to; the value itself where none has it (it can then not be met)."""
    return next((name for name, known in product.options.items() if value in known), value)


def _one(folder: Path, pattern: str) -> Path:
    """The smallest file of the pattern: where the small and the whole catalogue lie side by side, the small one."""
    files = sorted(folder.glob(pattern), key=lambda file: (file.stat().st_size, file.name)) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"data_path: {folder} holds no {pattern}, webshop. Fix: the folder of WebShop's files.")
    return files[0]


def _json(file: Path, kind: type) -> Any:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"data_path: {file} cannot be read ({error!s:.200}), webshop. Fix: another copy.") from error
    if not isinstance(found, kind):
        raise ConfigError(f"data_path: {file} holds no {kind.__name__}, webshop. Fix: another copy.")
    return found
