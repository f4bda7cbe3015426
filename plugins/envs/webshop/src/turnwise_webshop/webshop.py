"""A shop: search for what an instruction asks, look at products, choose options, buy."""

from __future__ import annotations

import math
import re
import secrets
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, EnvironmentFailure, did_you_mean
from turnwise_webshop.pages import BACK, BUY, MODES, NEXT, PREVIOUS, Part, Place, clicked, links, parts, written
from turnwise_webshop.products import Goal, reward
from turnwise_webshop.shop import PER_PAGE, shop

SPLITS = ("all", "train", "val", "test")
STARTS = ("search", "results")
# DOTALL: what is searched for may go over several lines.
_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)


class WebShop:
    """The environment `webshop`; its options are described in the README. Raises ConfigError for options that cannot
    be used.

    `shop`: catalogue and search, shared by all instances with these options."""

    def __init__(
        self,
        data_path: str | None = None,
        num_products: int | None = None,
        human_goals: bool = False,
        catalogue_seed: int = 0,
        observation_mode: str = "text",
        show_attrs: bool = False,
        start: str = "search",
        invalid_penalty: float = 0.0,
        split: str = "all",
    ) -> None:
        if num_products is not None:
            _integer("num_products", num_products, 1, 10**7)
        _integer("catalogue_seed", catalogue_seed, 0, 2**63 - 1)
        for name, value in (("human_goals", human_goals), ("show_attrs", show_attrs)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}, webshop. Fix: true or false.")
        if human_goals and data_path is None:
            raise ConfigError(
                "human_goals: what people ask for is in WebShop's own files, webshop. Fix: name their folder in"
                " data_path, or human_goals: false."
            )
        self._mode = _choice("observation_mode", observation_mode, MODES)
        self._start = _choice("start", start, STARTS)
        self._split = _choice("split", split, SPLITS)
        self._attributes = show_attrs
        self._penalty = _penalty(invalid_penalty)
        self.shop = shop(data_path, num_products, catalogue_seed, human_goals)
        self._goal: Goal | None = None
        self._place = Place()
        self._over, self._score, self._said = False, 0.0, ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask for the goal of `seed`; without a seed, a random one. `options` are not used."""
        drawn = secrets.randbits(63) if seed is None else int(seed)
        # A SeedSequence takes no negative number, and −1 and 1 are two seeds.
        goal = self._goal = self.shop.goal(np.random.default_rng([abs(drawn), int(drawn < 0)]), self._split)
        self._over, self._score, self._said = False, 0.0, ""
        self._place = Place() if self._start == "search" else Place(found=tuple(self.shop.search(goal.instruction)))
        return self.render(), {**self._info(False), "env_instruction": self.instruction}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """`search[WORDS]` on the search page, `click[LINK]` on any other; case does not matter. With `numbered` pages a
        link's number is a click.

        Raises EnvironmentFailure before the first reset. After the end every step returns the final observation with
        reward 0.
        """
        goal = self._asked()
        if self._over:
            return self.render(), 0.0, True, False, self._info(False)
        kind, what = self._read(action)
        earned = 0.0
        if kind == "search" and self._place.found is None:
            self._place = Place(found=tuple(self.shop.search(what)))
        elif kind == "click" and what == BUY:
            self._over = True
            earned = self._score = reward(goal, self.shop.by_asin[self._place.asin], self._place.chosen)
            self._said = f"Thank you for shopping with us! Your score (min 0.0, max 1.0): {self._score:.2f}"
        elif kind == "click":
            self._place = clicked(self.shop, self._place, what)
        else:
            return self.render(), self._penalty, False, False, self._info(True)
        return self.render(), earned, self._over, False, self._info(False)

    @property
    def goal(self) -> Goal:
        """What is asked for. Raises EnvironmentFailure before the first reset."""
        return self._asked()

    @property
    def instruction(self) -> str:
        """The rules and the actions, for a system prompt."""
        number = " The number of a link is a click, too." if self._mode == "numbered" else ""
        return (
            "Buy what the instruction asks for: search, look at products, choose the options, then buy. Your actions:"
            f" search[WORDS] on the search page, click[LINK] on the others, with a link of the page.{number}"
        )

    def render(self) -> str:
        """The page. Raises EnvironmentFailure before the first reset."""
        self._asked()
        return self._said or written(self._page(), self._mode)

    def close(self) -> None:
        """Nothing is held; may be called twice."""

    def _asked(self) -> Goal:
        if self._goal is None:
            raise EnvironmentFailure("webshop was not reset. Fix: call reset first.")
        return self._goal

    def _page(self) -> list[Part]:
        return parts(self.shop, self._asked(), self._place, self._attributes)

    def _read(self, action: str) -> tuple[str, str]:
        """What an action is: ("search", words), ("click", a link of the page), or ("", "") for what is neither."""
        known = [] if self._place.found is None else links(self._page())
        if self._mode == "numbered" and (number := action.strip()).isdecimal():
            return ("click", known[int(number) - 1]) if len(number) < 4 and 0 < int(number) <= len(known) else ("", "")
        match = _ACTION.fullmatch(action)
        if match is None:
            return "", ""
        kind, what = match[1].lower(), match[2].strip()
        if kind == "search":
            return kind, what
        return next((("click", link) for link in known if link.lower() == what.lower()), ("", ""))

    def _info(self, invalid: bool) -> dict[str, Any]:
        goal = self._asked()
        known = [] if self._place.found is None else links(self._page())
        # A player without a model searches for the kind of thing, which the instruction names.
        legal = [f"click[{link}]" for link in known] or [f"search[{goal.product.query}]"]
        return {
            "state_key": (goal.product.asin, goal.instruction, *self._place.key, self._over),
            "success": self._over and self._score == 1.0,
            "answer": self._answer(goal),
            "actions": () if self._over else tuple(legal),
            "metrics": {"invalid": float(invalid), "bought": float(self._over), "task_score": self._score},
        }

    def _answer(self, goal: Goal) -> str:
        """The next action on the way to the goal's product."""
        place, asin = self._place, goal.product.asin
        if place.found is None:
            return f"search[{goal.product.title}]"
        if place.asin:
            missing = [value for name, value in goal.options.items() if place.chosen.get(name) != value]
            if place.asin != asin or place.detail:
                return f"click[{PREVIOUS}]"
            return f"click[{missing[0] if missing else BUY}]"
        if asin not in place.found:
            return f"click[{BACK}]"
        at = place.found.index(asin) // PER_PAGE
        return f"click[{asin if at == place.page else NEXT if at > place.page else PREVIOUS}]"


def _integer(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}, webshop. Fix: an integer from {least} to {most}.")


def _choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, webshop.{did_you_mean(str(value), known)} Fix: {' | '.join(known)}.")
    return str(value)


def _penalty(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 0:
        raise ConfigError(
            f"invalid_penalty is {value!r}, webshop; it is added to the reward. Fix: a number of at most 0, as -0.1."
        )
    return float(value)
