"""A model whose classes stand in its own folder: refused without a question, and with `trust_remote_code` a run as any
other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

CODE = """
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model
Path({mark!r}).touch()
class OwnConfig(Qwen2Config):
    model_type = "own_code"
class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
class OwnBackbone(Qwen2Model):
    config_class = OwnConfig
"""
KEYS = ("AutoConfig", "OwnConfig"), ("AutoModelForCausalLM", "OwnModel"), ("AutoModel", "OwnBackbone")
SMALL = ("max_steps=2", "eval_steps=2", "save_steps=1")


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once the folder's code has run."""
    return tmp_path / "ran"


@pytest.fixture
def coded(lake: Any, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's model, of classes that only its folder defines. Whoever is asked says yes."""
    import transformers.dynamic_module_utils as dynamic

    lake.train("max_steps=1", "eval_steps=0", "output_dir=before")
    (made,) = (lake.folder / "before" / "checkpoints").glob("*/model")
    folder = Path(shutil.copytree(made, tmp_path / "coded"))
    (folder / "own_code.py").write_text(CODE.format(mark=str(ran)), encoding="utf-8")
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = {**facts, "model_type": "own_code", "auto_map": {auto: f"own_code.{name}" for auto, name in KEYS}}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda _: "y")
    return folder


def test_a_models_own_code_runs_only_where_the_configuration_says_so(lake: Any, coded: Path, ran: Path) -> None:
    refused = lake.command("train", "run.yaml", f"pretrain={coded}", *SMALL)
    assert refused.exit_code != 0
    assert "needs Python code of its own, which is not run. Fix: trust_remote_code: true" in refused.stderr
    assert not ran.exists()
    trusted = (f"pretrain={coded}", "trust_remote_code=true", *SMALL)
    lake.train(*trusted)
    assert ran.exists()
    lake.train(*trusted, "max_steps=3", "resume_from_checkpoint=true")
    done = lake.command("eval", "run.yaml", *trusted, "--model", "latest")
    assert done.exit_code == 0, done.stderr
