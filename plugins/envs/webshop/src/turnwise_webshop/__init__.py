"""Hooks of turnwise-webshop: a shop to search, click and buy in."""

from turnwise import Implementation, hookimpl


@hookimpl
def environments() -> list[Implementation]:
    """`webshop`."""
    return [
        Implementation(
            "webshop",
            target="turnwise_webshop.webshop:WebShop",
            summary="search, click and buy what an instruction asks for, in a generated catalogue or WebShop's own",
        )
    ]
