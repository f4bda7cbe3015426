"""A model by recipe keeps its vocabulary when it is resumed, whatever the environments' texts have become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

OTHER_TEXTS = (
    "custom_envs.Lake.env_manager={use: stepwise, history_length: 1, agent_system_template: 'aardvark zebra quagga'}"
)


def vocabulary(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return found


def test_a_resumed_recipe_model_has_the_vocabulary_of_its_checkpoint_and_its_first_weights(lake: Any) -> None:
    lake.train("max_steps=2")
    (first,) = (lake.folder / "out" / "model").iterdir()
    before = vocabulary(lake.folder / "out" / "checkpoints" / "checkpoint-000002" / "model")
    assert "quagga" not in before
    lake.train("max_steps=3", "resume_from_checkpoint=true", OTHER_TEXTS)
    assert vocabulary(lake.folder / "out" / "checkpoints" / "checkpoint-000003" / "model") == before
    # What the reference is loaded from: the weights of the recipe's seed, for the ids of that vocabulary.
    folders = list((lake.folder / "out" / "model").iterdir())
    assert {json.dumps(vocabulary(folder), sort_keys=True) for folder in folders} == {
        json.dumps(before, sort_keys=True)
    }
    expected = load_file(first / "model.safetensors")
    for folder in folders:
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(np.array_equal(weights[name], expected[name]) for name in expected)


def test_other_texts_would_have_given_another_vocabulary(lake: Any) -> None:
    lake.train("max_steps=1", OTHER_TEXTS)
    assert any(
        "quagga" in word for word in vocabulary(lake.folder / "out" / "checkpoints" / "checkpoint-000001" / "model")
    )
