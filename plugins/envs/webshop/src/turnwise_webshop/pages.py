"""The pages of the shop, and how they are written down for a model."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from turnwise_webshop.products import Goal, Product
from turnwise_webshop.shop import PER_PAGE, Shop

BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
DETAILS = ("Description", "Features")
ATTRIBUTES = "Attributes"
MODES = ("text", "text_rich", "numbered")


@frozen
class Place:
    """Where the customer stands. `found`: what the search found (None: nothing was searched for); `page`: of the
    results, from 0; `asin`: the product that is looked at; `chosen`: its option name → value; `detail`: which of its
    pages."""

    found: tuple[str, ...] | None = None
    page: int = 0
    asin: str = ""
    chosen: Mapping[str, str] = field(factory=dict)
    detail: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells one place from another."""
        return (
            self.found or (),
            self.found is None,
            self.page,
            self.asin,
            tuple(sorted(self.chosen.items())),
            self.detail,
        )


@frozen
class Part:
    """A piece of a page: a text, or (`link`) what can be clicked. `chosen`: an option's value that was."""

    text: str
    link: bool = False
    chosen: bool = False


def parts(shop: Shop, goal: Goal, place: Place, attributes: bool) -> list[Part]:
    """The page of a place; `attributes`: products have the page Attributes."""
    head = [Part("Instruction:"), Part(goal.instruction)]
    if place.found is None:
        return [*head, Part("Search")]
    if not place.asin:
        return [*head, Part(BACK, link=True), *_results(shop, place)]
    product = shop.by_asin[place.asin]
    head += [Part(BACK, link=True), Part(PREVIOUS, link=True)]
    if place.detail:
        return [*head, Part(_detail(product, place.detail))]
    return [*head, *_item(product, place, attributes)]


def _results(shop: Shop, place: Place) -> list[Part]:
    found = place.found or ()
    pages = max(1, -(-len(found) // PER_PAGE))
    lines = [Part(f"Page {place.page + 1} (Total results: {len(found)})")]
    lines += [Part(PREVIOUS, link=True)] if place.page else []
    lines += [Part(NEXT, link=True)] if place.page + 1 < pages else []
    for asin in found[place.page * PER_PAGE : (place.page + 1) * PER_PAGE]:
        product = shop.by_asin[asin]
        lines += [Part(asin, link=True), Part(product.title), Part(f"${product.price:.2f}")]
    return lines


def _item(product: Product, place: Place, attributes: bool) -> list[Part]:
    lines = []
    for name, known in product.options.items():
        lines.append(Part(name))
        lines += [Part(value, link=True, chosen=place.chosen.get(name) == value) for value in known]
    lines += [Part(product.title), Part(f"Price: ${product.price:.2f}")]
    lines += [Part(detail, link=True) for detail in (*DETAILS, *((ATTRIBUTES,) if attributes else ()))]
    return [*lines, Part(BUY, link=True)]


def _detail(product: Product, detail: str) -> str:
    texts = {"Description": product.description, "Features": " ".join(product.bullets)}
    return texts.get(detail, ", ".join(product.attributes)) or "Nothing is said."


def links(page: list[Part]) -> list[str]:
    """What can be clicked, each once."""
    return list(dict.fromkeys(part.text for part in page if part.link))


def written(page: list[Part], mode: str) -> str:
    """The page as a text: the original's `text` (pieces between [SEP]) or `text_rich` (buttons between marks), or
    `numbered`, where a link has a number by which it may be clicked."""
    if mode == "text":
        return " [SEP] ".join(["WebShop", *(part.text for part in page)])
    if mode == "text_rich":
        return "\n".join(_button(part) if part.link else part.text for part in page)
    numbers = {text: number for number, text in enumerate(links(page), 1)}
    return "\n".join(
        f"{numbers[part.text]} {part.text}{' (chosen)' if part.chosen else ''}" if part.link else part.text
        for part in page
    )


def _button(part: Part) -> str:
    return f"[clicked button] {part.text} [clicked button_]" if part.chosen else f"[button] {part.text} [button_]"


def clicked(shop: Shop, place: Place, link: str) -> Place:
    """Where a link leads that the page has (not `Buy Now`, which ends the visit)."""
    if link == BACK:
        return Place()
    if link == PREVIOUS:
        if place.detail:
            return evolve(place, detail="")
        return evolve(place, asin="", chosen={}) if place.asin else evolve(place, page=place.page - 1)
    if link == NEXT:
        return evolve(place, page=place.page + 1)
    if not place.asin:
        return evolve(place, asin=link)
    for name, known in shop.by_asin[place.asin].options.items():
        if link in known:
            return evolve(place, chosen={**place.chosen, name: link})
    return evolve(place, detail=link)
