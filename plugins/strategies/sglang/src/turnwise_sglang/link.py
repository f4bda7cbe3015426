"""One server as its users see it: how to call it, and what it holds of ours."""

from __future__ import annotations

from attrs import define

from turnwise_sglang.api import Api
from turnwise_sglang.server import Server


@define(eq=False)
class Link:
    """One server: how to call it, how many tensor parallel ranks it has, its process if it is ours. `lost`: it is of no
    use any more.

    `device`: cpu or cuda. `group`: the process group that its ranks share with the trainer. `bare`: it took the place
    of another and lacks that one's weights. `adapter`: the name of the adapter that requests have to give ("": none).
    `phase`: what it was last found dead in.
    """

    api: Api
    server: Server | None
    ranks: int = 1
    lost: bool = False
    device: str = "cpu"
    group: str = ""
    bare: bool = False
    adapter: str = ""
    phase: str = "sampling"
