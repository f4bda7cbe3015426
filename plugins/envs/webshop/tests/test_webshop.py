"""The environment `webshop`: catalogue, search, pages, purchases, WebShop's own files, options."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.environment import Environment, check_reset, check_step
from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise_webshop.generated import catalogue
from turnwise_webshop.products import Goal, Product, reward
from turnwise_webshop.shop import Shop
from turnwise_webshop.webshop import WebShop

SMALL: dict[str, Any] = {"num_products": 60}


def product(asin: str = "A", **fields: Any) -> Product:
    known: dict[str, Any] = {
        "title": "red wool hat",
        "category": ("clothing", "hats"),
        "query": "hat",
        "attributes": ("wool", "hand wash"),
        "options": {"size": ("s", "m"), "color": ("red", "blue")},
        "price": 20.0,
    }
    return Product(asin, **known | fields)


def bought(env: WebShop, seed: int) -> tuple[float, dict[str, Any], int]:
    """Follow `answer` from the reset to the purchase: (reward, info, turns)."""
    _, info = env.reset(seed=seed)
    for turn in range(1, 20):
        _, earned, over, _, info = env.step(info["answer"])
        if over:
            return earned, info, turn
    raise AssertionError("nothing was bought")


# ---------------------------------------------------------------- the reward, by hand


@pytest.mark.parametrize(
    ("found", "chosen", "expected"),
    [
        ({}, {"size": "m", "color": "red"}, 1.0),
        ({}, {"size": "s", "color": "red"}, 3 / 4),
        ({}, {}, 2 / 4),
        ({"price": 30.01}, {"size": "m", "color": "red"}, 3 / 4),
        ({"attributes": ()}, {"size": "m", "color": "red"}, 1.0),  # wool stands in the title
        ({"attributes": (), "title": "red hat"}, {"size": "m", "color": "red"}, 3 / 4),
        ({"attributes": (), "title": "red hat", "bullets": ("Of WOOL.",)}, {"size": "m", "color": "red"}, 1.0),
        ({"attributes": (), "title": "red hat woollen"}, {"size": "m", "color": "red"}, 3 / 4),
        ({"title": "green leather boots"}, {"size": "m", "color": "red"}, 0.0),
    ],
)
def test_a_purchase_earns_the_share_of_what_was_asked_for(
    found: dict[str, Any], chosen: dict[str, str], expected: float
) -> None:
    asked = product()
    goal = Goal(asked, "", ("wool",), {"size": "m", "color": "red"}, 30.0)
    assert reward(goal, product("B", **found), chosen) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shared", "query", "category", "share"),
    [
        (0, "hat", ("clothing", "hats"), 0.0),
        (1, "hat", ("clothing", "hats"), 0.1),
        (2, "boots", ("shoes",), 0.5),
        (2, "hat", ("shoes",), 1.0),
        (2, "boots", ("clothing", "hats"), 1.0),
        (5, "boots", ("shoes",), 1.0),
    ],
)
def test_another_kind_of_thing_is_worth_less(shared: int, query: str, category: tuple[str, ...], share: float) -> None:
    """A title of twenty words: one in common is 0.05, two are 0.1, five are 0.25."""
    title = [f"word{i}" for i in range(20)]
    other = " ".join([*title[:shared], *(f"other{i}" for i in range(20 - shared))])
    goal = Goal(product(title=" ".join(title)), "", (), {}, 30.0)
    assert reward(goal, product("B", title=other, query=query, category=category), {}) == share


# ---------------------------------------------------------------- catalogue and search


def test_equal_options_give_equal_catalogues_and_another_seed_another() -> None:
    first, again, other = catalogue(3, 50), catalogue(3, 50), catalogue(4, 50)
    assert [(p.title, p.price, p.options) for p in first] == [(p.title, p.price, p.options) for p in again]
    assert [p.title for p in first] != [p.title for p in other]
    assert len({p.title for p in first}) == len({p.asin for p in first}) == 50


def slow_bm25(texts: list[list[str]], query: list[str]) -> list[float]:
    """Lucene's BM25 with k1 = 1.5 and b = 0.75, term by term."""
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for word in query:
            having = sum(word in other for other in texts)
            times = text.count(word)
            idf = np.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            score += idf * times / (times + 1.5 * (1 - 0.75 + 0.75 * len(text) / mean))
        scores.append(score)
    return scores


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["hat", "wool", "red", "boots", "zzz", "model"]), max_size=4))
def test_search_ranks_as_a_slow_reference_does(query: list[str]) -> None:
    rng = np.random.default_rng(0)
    titles = [" ".join(rng.choice(["hat", "wool", "red", "boots", "model"], 4)) for _ in range(12)]
    products = [
        product(str(i), title=title, category=(), options={}, description="", query="")
        for i, title in enumerate(titles)
    ]
    scores = slow_bm25([title.split() for title in titles], query)
    found = Shop(products, {}).search(" ".join(query))
    assert set(found) == {str(i) for i, score in enumerate(scores) if score > 0}
    ranked = [scores[int(asin)] for asin in found]
    assert all(a >= b - 1e-6 for a, b in pairwise(ranked))


def test_a_search_of_no_known_word_finds_nothing_and_the_customer_can_go_back() -> None:
    env = WebShop(**SMALL)
    env.reset(seed=0)
    page, earned, over, _, info = env.step("search[qwertz !]")
    assert "Total results: 0" in page
    assert (earned, over, info["actions"]) == (0.0, False, ("click[Back to Search]",))
    assert env.step("click[back to search]")[0].endswith("[SEP] Search")
    assert "Total results: 0" in env.step("search[]")[0]


# ---------------------------------------------------------------- playing


@pytest.mark.parametrize("mode", ["text", "text_rich", "numbered"])
@pytest.mark.parametrize("start", ["search", "results"])
def test_the_answers_buy_what_is_asked_for(mode: str, start: str) -> None:
    env = WebShop(**SMALL, observation_mode=mode, start=start)
    for seed in range(40):
        earned, info, turns = bought(env, seed)
        assert (earned, info["success"], info["actions"]) == (1.0, True, ())
        assert turns <= 12
        assert info["metrics"] == {"invalid": 0.0, "bought": 1.0, "task_score": 1.0}


def test_the_other_product_of_the_same_kind_earns_a_part() -> None:
    env = WebShop(**SMALL)
    _, info = env.reset(seed=1)
    goal = env.goal
    other = next(p for p in env.shop.products if p.query == goal.product.query and p is not goal.product)
    for action in (f"search[{other.title}]", f"click[{other.asin.lower()}]", "click[BUY NOW]"):
        page, earned, over, _, info = env.step(action)
    assert over
    assert 0 < earned < 1
    assert earned == reward(goal, other, {})
    assert f"{earned:.2f}" in page
    assert not info["success"]
    assert env.step("click[Buy Now]")[1:4] == (0.0, True, False)


def test_pages_of_results_and_of_a_product_lead_back() -> None:
    env = WebShop(**SMALL)
    env.reset(seed=0)
    first = env.step("search[model]")[0]
    assert "Page 1 (Total results: 50)" in first
    second = env.step("click[next >]")[0]
    assert "Page 2" in second
    asin = next(word for word in second.split() if word.startswith("B0"))
    item = env.step(f"click[{asin}]")[0]
    color = env.shop.by_asin[asin].options["color"][0]
    chosen = env.step(f"click[{color}]")[4]["state_key"]
    assert "[SEP]" in env.step("click[Features]")[0]
    assert env.step("click[< Prev]")[4]["state_key"] == chosen
    assert env.step("click[< Prev]")[0] == second
    assert env.step(f"click[{asin}]")[0] == item  # what was chosen is forgotten
    assert env.step("click[< Prev]")[0] == second
    assert env.step("click[< Prev]")[0] == first


@pytest.mark.parametrize(
    "action",
    [
        "",
        "buy",
        "click[Buy Now]",
        "click[]",
        "search",
        "search[hat",
        "1",
        "0",
        "99",
        "²",
        "[search[hat]]",
        "Search: hat",
    ],
)
def test_what_the_page_does_not_offer_is_invalid_and_changes_nothing(action: str) -> None:
    env = WebShop(**SMALL, invalid_penalty=-0.2, observation_mode="numbered")
    before, told = env.reset(seed=0)
    page, earned, over, truncated, info = env.step(action)
    assert (page, earned, over, truncated) == (before, -0.2, False, False)
    assert info["metrics"]["invalid"] == 1.0
    assert info["state_key"] == told["state_key"]


def test_a_number_is_the_link_that_bears_it() -> None:
    env, other = (WebShop(**SMALL, start="results", observation_mode="numbered") for _ in range(2))
    _, told = env.reset(seed=2)
    other.reset(seed=2)
    for number, action in enumerate(told["actions"], 1):
        env.reset(seed=2)
        other.reset(seed=2)
        assert env.step(f" {number} ")[0] == other.step(action)[0]
    env.reset(seed=2)
    assert env.step(str(len(told["actions"]) + 1))[4]["metrics"]["invalid"] == 1.0


def test_rich_pages_mark_buttons_and_what_was_clicked() -> None:
    env = WebShop(**SMALL, observation_mode="text_rich", show_attrs=True)
    _, info = env.reset(seed=0)
    asin, color = env.goal.product.asin, env.goal.options["color"]
    env.step(info["answer"])
    assert f"[button] {asin} [button_]" in env.step(f"search[{env.goal.product.title}]")[0] + env.render()
    env.step(f"click[{asin}]")
    assert f"[clicked button] {color} [clicked button_]" in env.step(f"click[{color}]")[0]
    assert ", ".join(env.goal.product.attributes) in env.step("click[Attributes]")[0]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.data())
def test_an_episode_of_any_legal_actions_keeps_the_contract_and_repeats(seed: int, data: Any) -> None:
    env, again = WebShop(**SMALL), WebShop(**SMALL)
    assert isinstance(env, Environment)
    observation, info = check_reset(env.reset(seed=seed), "webshop")
    assert again.reset(seed=seed) == (observation, info)
    for _ in range(8):
        action = data.draw(st.sampled_from(info["actions"]))
        result = check_step(env.step(action), "webshop")
        assert again.step(action) == result
        info = result[4]
        assert 0 <= result[1] <= 1
        if result[2]:
            break


def test_splits_ask_for_other_things() -> None:
    goals = {
        split: {(g.product.asin, g.attributes, tuple(g.options.items())) for g in _goals(split)}
        for split in ("train", "val", "test")
    }
    assert not goals["train"] & goals["val"]
    assert not goals["train"] & goals["test"]
    assert not goals["val"] & goals["test"]
    assert min(map(len, goals.values())) > 20


def _goals(split: str) -> list[Goal]:
    env = WebShop(**SMALL, split=split)
    found = []
    for seed in range(60):
        env.reset(seed=seed)
        found.append(env.goal)
    return found


# ---------------------------------------------------------------- WebShop's own files

ITEMS: list[dict[str, Any]] = [
    {
        "asin": "B01",
        "name": "Wool Hat",
        "product_category": "Clothing › Hats",
        "query": "Hats",
        "pricing": "$1,019.99 $2,000.00",
        "full_description": "Warm.",
        "small_description": ["Hand wash"],
        "customization_options": {"Size": [{"value": " M "}, {"value": "S"}], "color": None},
    },
    {"asin": "B02", "name": "Chair", "pricing": "", "customization_options": {}, "query": "chairs"},
]
INSTRUCTIONS = {"B01": {"attributes": ["Wool", "hand wash"]}}
PEOPLE = {
    "B01": [
        {"instruction": "i need a warm hat.", "instruction_attributes": ["wool"], "instruction_options": ["m"]},
        {"instruction": "no attribute", "instruction_attributes": [], "instruction_options": []},
    ],
    "B99": [{"instruction": "not sold", "instruction_attributes": ["x"], "instruction_options": []}],
}


def files(folder: Path, **other: Any) -> str:
    contents = {"items_shuffle_1000": ITEMS, "items_ins_v2_1000": INSTRUCTIONS, "items_human_ins": PEOPLE} | other
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return str(folder)


def test_the_catalogue_of_webshop_is_read(tmp_path: Path) -> None:
    env = WebShop(data_path=files(tmp_path))
    hat, chair = env.shop.products
    assert (hat.category, hat.query, hat.price) == (("Clothing", "Hats"), "hats", 1019.99)
    assert (hat.attributes, dict(hat.options)) == (("wool", "hand wash"), {"size": ("m", "s")})
    assert (chair.price, chair.attributes, dict(chair.options)) == (100.0, (), {})
    for seed in range(10):
        assert bought(env, seed)[0] == 1.0
    assert len(WebShop(data_path=files(tmp_path), num_products=1).shop.products) == 1


def test_what_people_ask_for_is_read(tmp_path: Path) -> None:
    env = WebShop(data_path=files(tmp_path), human_goals=True)
    for seed in range(5):
        page, _ = env.reset(seed=seed)
        assert "i need a warm hat, and price lower than 10" in page
        assert (env.goal.attributes, env.goal.options) == (("wool",), {"size": "m"})
        assert bought(env, seed)[0] == 1.0


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"items_shuffle_1000": "{"}, "cannot be read"),
        ({"items_shuffle_1000": "[" * 5000}, "cannot be read"),
        ({"items_shuffle_1000": {}}, "holds no list"),
        ({"items_shuffle_1000": []}, "holds no product"),
        ({"items_shuffle_1000": [3]}, "an entry of"),
        ({"items_shuffle_1000": [{"name": "x"}]}, "asin"),
        ({"items_ins_v2_1000": {"B01": 3}}, "an entry of"),
        ({"items_human_ins": {"B01": [3]}}, "an entry of"),
        ({"items_human_ins": {}}, "nobody asks"),
    ],
)
def test_files_of_another_form_are_refused_in_one_line(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        WebShop(data_path=files(tmp_path, **other), human_goals=True)
    assert "Fix:" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="items_shuffle"):
            WebShop(data_path=str(path))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_products": 0}, "num_products is 0"),
        ({"num_products": True}, "num_products is True"),
        ({"catalogue_seed": -1}, "catalogue_seed"),
        ({"observation_mode": "html"}, "text | text_rich | numbered"),
        ({"start": "result"}, "did you mean"),
        ({"split": "dev"}, "split"),
        ({"invalid_penalty": 0.1}, "at most 0"),
        ({"invalid_penalty": float("nan")}, "at most 0"),
        ({"show_attrs": 1}, "true or false"),
        ({"human_goals": True}, "data_path"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WebShop(**options)
    assert says.lower() in str(refused.value).lower()
    assert "Fix:" in str(refused.value)


def test_a_catalogue_too_small_for_a_split_is_said() -> None:
    seed = next(seed for seed in range(99) if not _has(seed, "val"))
    env = WebShop(num_products=1, split="val", catalogue_seed=seed)
    with pytest.raises(ConfigError, match="no goal of split"):
        env.reset(seed=0)


def _has(seed: int, split: str) -> bool:
    try:
        WebShop(num_products=1, catalogue_seed=seed, split=split).reset(seed=0)
    except ConfigError:
        return False
    return True


def test_nothing_is_played_before_the_first_reset() -> None:
    env = WebShop(**SMALL)
    for call in (lambda: env.step("search[x]"), env.render, lambda: env.goal):
        with pytest.raises(EnvironmentFailure, match="reset"):
            call()
    assert env.reset()[0]
    env.close()
    env.close()
