"""What the conformance kit needs: turnwise-torch's tiny model and the log-probs that plain transformers gives for
it."""

from __future__ import annotations

from typing import Any

from turnwise_megatron.config import MegatronConfig
from turnwise_torch.fixtures import strategy_fixture as torch_fixture


def strategy_fixture() -> dict[str, Any]:
    """`config`, `context` (fp32, temperature .7, the loss `vanilla` of turnwise-losses), `reference_logprobs`,
    `vocab_size`."""
    return {**torch_fixture(), "config": MegatronConfig()}
