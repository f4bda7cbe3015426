"""`turnwise check` and the metric `env/<tag>/drift`: does the model's chat template write earlier turns as the model
wrote them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.contracts.chat import ModelSourceContext
from turnwise_hf.source import HfModelSource

KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = KEEPS.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{%"
    " endif %}",
)
TRIMS = KEEPS.replace(
    "{{ m.content }}", "{{ 'It says: ' + m.content if m.role == 'assistant' and not loop.last else m.content }}"
)


def model(folder: Path, template: str) -> Path:
    """A tiny model with this chat template."""
    recipe = {
        "recipe": {
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 2,
            "tokenizer": "byte_bpe",
            "vocab_size": 300,
            "chat_template": template,
        }
    }
    return HfModelSource(None, ModelSourceContext(cache=folder, texts=tuple)).prepare(recipe)


def with_manager(run: Any, manager: str) -> None:
    """Write this manager into the configuration."""
    keys = yaml.safe_load(run.yaml.read_text())
    for env in keys["custom_envs"].values():
        env["env_manager"] = yaml.safe_load(manager)
    run.yaml.write_text(yaml.safe_dump(keys, sort_keys=False))


def warnings(result: Any) -> list[str]:
    return [line for line in result.stderr.splitlines() if not line.startswith("note: ")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (KEEPS, ""),
        (
            STRIPS,
            "the prompts of turns 1, 2 of 3 differ (responses with <think>…</think> before the action), first '<think>",
        ),
        (TRIMS, "the prompts of turns 1, 2 of 3 differ (responses of an action alone)"),
    ],
    ids=["keeps", "strips", "writes more"],
)
def test_check_warns_of_a_template_that_changes_earlier_turns(
    lake: Any, tmp_path: Path, template: str, expected: str
) -> None:
    with_manager(lake, "{use: trajectory}")
    size = "custom_envs.Lake.env_config.size=8"  # no way across in three turns
    result = lake.command("check", "run.yaml", f"pretrain={model(tmp_path, template)}", size)
    assert result.exit_code == 0, result.output
    assert result.stdout == "run.yaml: ready to train\n"
    assert len(warnings(result)) == bool(expected)
    for line in warnings(result):
        assert line.startswith(
            "warning: custom_envs.Lake.env_manager: the chat template writes earlier turns otherwise"
        )
        assert expected in line


def test_check_says_nothing_of_step_wise_prompts_which_are_renderings(lake: Any, tmp_path: Path) -> None:
    result = lake.command("check", "run.yaml", f"pretrain={model(tmp_path, STRIPS)}")
    assert (result.exit_code, warnings(result)) == (0, [])


def test_a_run_logs_the_share_of_turns_that_drift(lake: Any, tmp_path: Path) -> None:
    with_manager(lake, "{use: trajectory, detect_drift: true}")
    lake.train(f"pretrain={model(tmp_path, TRIMS)}", "max_steps=1", "eval_steps=0")
    shares = [line["env/Lake/drift"] for line in lake.metrics() if "env/Lake/drift" in line]
    assert shares
    assert all(0 < share < 1 for share in shares)


BREAKS = """\
from turnwise import Implementation, hookimpl
from turnwise_gymnasium.frozen_lake import FrozenLake

class Breaks(FrozenLake):
    def step(self, action):
        raise RuntimeError("out of order")

@hookimpl
def environments():
    return [Implementation("breaks", Breaks)]
"""


def test_an_environment_that_cannot_be_played_is_reported_and_the_check_goes_on(lake: Any, tmp_path: Path) -> None:
    (lake.folder / "breaks.py").write_text(BREAKS)
    with_manager(lake, "trajectory")
    keys = yaml.safe_load(lake.yaml.read_text())
    keys["plugins"].append("./breaks.py")
    for env in keys["custom_envs"].values():
        env["env_type"] = "breaks"
    lake.yaml.write_text(yaml.safe_dump(keys, sort_keys=False))
    result = lake.command("check", "run.yaml", f"pretrain={model(tmp_path, KEEPS)}")
    assert result.exit_code == 0, result.output
    (line,) = warnings(result)
    assert line.startswith(
        "warning: custom_envs.Lake.env_manager: whether the chat template drifts could not be tried: "
    )
    assert "out of order" in line
