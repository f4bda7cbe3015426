"""Model folders that bring Python code: nobody is asked on a terminal, and nothing of it runs unless the configuration
says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.inference import InferenceContext
from turnwise.errors import CheckpointError, ConfigError
from turnwise_hf.backend import HfBackend
from turnwise_hf.chat import HfChat
from turnwise_hf.config import HfConfig
from turnwise_hf.source import HfModelSource
from turnwise_torch.models import load_causal_lm

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
Path({mark!r}).touch()
class OwnConfig(Qwen2Config):
    model_type = "own_code"
class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once the folder's code has run."""
    return tmp_path / "ran"


@pytest.fixture
def coded(folder: Path, tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, tokenizer included, of classes that only its own folder defines. Whoever is asked says yes."""
    import transformers.dynamic_module_utils as dynamic

    copy = Path(shutil.copytree(folder, tmp_path / "coded"))
    (copy / "own_code.py").write_text(CODE.format(mark=str(ran)), encoding="utf-8")
    classes = {
        "config.json": {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
    }
    for name, names in classes.items():
        facts = json.loads((copy / name).read_text(encoding="utf-8"))
        changed = {
            **facts,
            "auto_map": names,
            **({"model_type": "own_code"} if name == "config.json" else {"tokenizer_class": "OwnTokenizer"}),
        }
        (copy / name).write_text(json.dumps(changed), encoding="utf-8")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda _: "y")
    return copy


def test_a_models_own_code_does_not_run_and_the_key_that_allows_it_is_named(coded: Path, ran: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"needs Python code of its own, which is not run\. Fix: trust_remote_code: true, if you trust",
    ):
        load_causal_lm(coded, "fp32", "sdpa")
    assert not ran.exists()


def test_a_tokenizers_own_code_does_not_run_and_the_key_that_allows_it_is_named(coded: Path, ran: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"needs Python code of its own, which is not run\. Fix: trust_remote_code: true, if you trust",
    ):
        HfModelSource(None, ModelSourceContext(cache=coded.parent)).chat(coded)
    assert not ran.exists()


def test_code_that_is_trusted_serves_as_any_model(folder: Path, coded: Path, ran: Path) -> None:
    source = HfModelSource(None, ModelSourceContext(cache=coded.parent, trust_remote_code=True))
    context = InferenceContext(coded, source.chat(coded), dtype="fp32", trust_remote_code=True)
    assert ran.exists()
    backend: Any = HfBackend(HfConfig(), context)
    messages = [{"role": "user", "content": "Which way?"}]
    ids = HfChat(folder).render(messages)
    assert context.chat is not None and context.chat.render(messages).tolist() == ids.tolist()
    with torch.no_grad():
        own = load_causal_lm(coded, "fp32", "sdpa", trust_remote_code=True)(torch.tensor(ids)[None]).logits
        assert torch.equal(own, load_causal_lm(folder, "fp32", "sdpa")(torch.tensor(ids)[None]).logits)
    with pytest.raises(ConfigError, match="trust_remote_code"):
        HfBackend(HfConfig(), evolve(backend._context, chat=None, trust_remote_code=False))
