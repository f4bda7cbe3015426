"""A recipe gives an ordinary model folder, the same one for the same seed; mistakes are told in one line each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.contracts.chat import ModelSourceContext
from turnwise.errors import ConfigError, MachineError
from turnwise_hf.config import Recipe, recipe_from, recipe_problems
from turnwise_hf.folder import folder_problems
from turnwise_hf.recipe import prepare_recipe
from turnwise_hf.source import HfModelSource
from turnwise_hf.tokenizers import build_tokenizer

TEXTS = ["The goal is 2 down 1 right. Holes: Left Down.", "Left", "P _ O\n_ _ G"]
SHOWN = [{"role": "user", "content": text} for text in TEXTS]


def source(cache: Path, seed: int = 0) -> HfModelSource:
    return HfModelSource(None, ModelSourceContext(cache=cache, seed=seed, texts=lambda: SHOWN))


@pytest.mark.parametrize("tokenizer", ["word", "byte_bpe"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_a_recipe_gives_a_folder_that_transformers_loads_with_the_same_tokens(
    make: Callable[..., Path], architecture: str, tokenizer: str
) -> None:
    folder = make(architecture=architecture, tokenizer=tokenizer, vocab_size=300)
    assert folder_problems(folder) == []
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert (model.config.model_type, model.config.hidden_size, model.config.num_key_value_heads) == (
        architecture,
        32,
        2,
    )
    assert model.config.vocab_size == len(loaded)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids("<|im_end|>")
    text = "Which way? Left Down.\n<|im_start|>user\nThe goal<|im_end|>"
    ids = HfModelSource(None, ModelSourceContext(cache=folder)).chat(folder)._encode(text)  # type: ignore[attr-defined]
    assert loaded(text, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert loaded.decode(ids) == text


def test_a_recipe_with_experts_has_those_that_it_names(make: Callable[..., Path]) -> None:
    config = AutoModelForCausalLM.from_pretrained(make(architecture="qwen3_moe")).config
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob) == (
        4,
        2,
        32,
        True,
    )
    chosen = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    model = AutoModelForCausalLM.from_pretrained(make(architecture="qwen3_moe", **chosen))
    assert {key: getattr(model.config, key) for key in chosen} == chosen
    assert model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 48, 32)


def test_equal_seeds_give_equal_weights_and_leave_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    one = prepare_recipe(Recipe(seed=3), SHOWN, 0, tmp_path / "one")
    two = prepare_recipe(Recipe(seed=3), [*reversed(SHOWN), SHOWN[0]], 1, tmp_path / "two")
    other = prepare_recipe(Recipe(seed=None), SHOWN, 4, tmp_path / "one")
    assert torch.equal(before, torch.random.get_rng_state())
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert one.name == two.name
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_a_complete_folder_is_reused_and_a_broken_one_is_made_again(tmp_path: Path) -> None:
    folder = source(tmp_path).prepare({"recipe": {}})
    weights = folder / "model.safetensors"
    stamp, content = weights.stat().st_mtime_ns, weights.read_bytes()
    assert source(tmp_path).prepare({}) == folder
    assert weights.stat().st_mtime_ns == stamp
    weights.write_bytes(content[:-100])
    assert source(tmp_path).prepare({"recipe": {}}) == folder
    assert weights.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_the_word_tokenizer_has_one_token_a_word_and_knows_all_digits() -> None:
    tokenizer = build_tokenizer(Recipe(), TEXTS)
    assert [
        tokenizer.convert_ids_to_tokens(i)
        for i in tokenizer("The goal is 9 down.\nLeft", add_special_tokens=False)["input_ids"]
    ] == [*["The", " goal", " is", " 9", " down", ".", "\n", "Left"]]
    assert "<unk>" in tokenizer.convert_ids_to_tokens(tokenizer("zebra", add_special_tokens=False)["input_ids"])
    roles = tokenizer("<|im_start|>system\n<|im_start|>user\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    assert tokenizer.unk_token_id not in roles
    assert len(tokenizer) < 50


PIECES = [
    "The",
    " goal",
    " is",
    " 2",
    " 7",
    " down",
    ".",
    " Left",
    "Left",
    "\n",
    " ",
    "P",
    " _",
    "<|im_end|>",
    "user",
    ":",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_text_of_known_pieces_comes_back_from_the_word_tokenizer(chosen: list[str]) -> None:
    tokenizer = WORD
    text = "".join(chosen)
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    # Pieces may join to words that are not known ("Left" + "Left"): then, and only then, something is lost.
    if tokenizer.unk_token_id not in ids:
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text
    separate = [i for piece in chosen for i in tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False).ids]
    assert tokenizer.backend_tokenizer.decode(separate, skip_special_tokens=False) == text


WORD = build_tokenizer(Recipe(), TEXTS)


@given(st.text(max_size=40))
def test_any_text_comes_back_from_the_byte_level_tokenizer(text: str) -> None:
    backend = BYTES.backend_tokenizer
    assert backend.decode(backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


BYTES = build_tokenizer(Recipe(tokenizer="byte_bpe", vocab_size=300), TEXTS)


def test_a_custom_chat_template_brings_its_special_tokens(make: Callable[..., Path]) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}{% if add_generation_prompt"
        " %}<|assistant|>{% endif %}"
    )
    folder = make(chat_template=template)
    chat = HfModelSource(None, ModelSourceContext(cache=folder)).chat(folder)
    eot = chat.tokenizer.convert_tokens_to_ids("<|eot|>")  # type: ignore[attr-defined]
    assert eot == chat.stop_ids[0]
    ids = chat.render([{"role": "user", "content": "Which way?"}])
    assert list(chat.tokenizer.convert_ids_to_tokens(ids)) == [
        *["<", "|", "user", "|", ">", "Which", " way", "?", "<|eot|>", "<|assistant|>"]
    ]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"hiden_size": 8}, r"unknown key 'hiden_size'\. Did you mean 'hidden_size'\?"),
        (
            {"architecture": "qwen"},
            r"architecture: 'qwen' is not one of llama, qwen2, qwen2_5_vl, qwen3, qwen3_moe\. Did you mean 'qwen",
        ),
        ({"architecture": "qwen3_moe", "num_experts": 1}, "num_experts_per_tok 2 is more than num_experts 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: 0 is not a positive integer"),
        ({"num_layers": 0}, "num_layers: 0 is not a positive integer"),
        ({"num_layers": True}, "num_layers: True is not a positive integer"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not a positive integer"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1 is not true or false"),
        ({"initializer_range": 0}, "initializer_range: 0 is not a positive number"),
        ({"seed": -1}, "seed: -1 is not a non-negative integer"),
        ({"chat_template": 3}, "chat_template: 3 is not a Jinja template"),
        ({"hidden_size": 60}, "hidden_size 60 is not an even multiple of num_heads 4"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"tokenizer": "byte_bpe", "vocab_size": 200}, "vocab_size: 200 is below 259"),
        ("qwen2", "'qwen2' is not a mapping"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line(recipe: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipe_from({"recipe": recipe})
    assert source(tmp_path).check({"recipe": recipe}) == recipe_problems({"recipe": recipe})
    assert "Fix: " in caught.value.problems[0]
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.problems[0]


def test_all_mistakes_are_told_at_once_and_a_recipe_may_stand_without_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from({"sed": 1, "num_layers": 0})
    assert len(caught.value.problems) == 2
    assert recipe_from({"recipe": None}) == recipe_from({}) == Recipe()


def test_a_template_that_cannot_render_and_a_word_tokenizer_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot render a user's message: no"):
        prepare_recipe(Recipe(chat_template="{{ raise_exception('no') }}"), SHOWN, 0, tmp_path)
    with pytest.raises(ConfigError, match="word needs the environments' texts"):
        prepare_recipe(Recipe(), [], 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot write the model made by pretrain\.recipe"):
        source(tmp_path / "file").prepare({})


def test_a_folder_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    assert source(tmp_path).prepare(str(folder)) == folder
    assert source(tmp_path).check(str(folder)) == []


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def _no_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shutil.rmtree, "is not there"),
        (_without("config.json"), r"is not a model folder \(it has no config\.json\)"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not a model's configuration"),
        (_without("model.safetensors"), "has no weights as safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "cut short, or no safetensors file"),
        (_cut_short, "cannot read .*: cut short"),
        (_no_shard, r"lacks the shard model-1\.safetensors"),
        (_without("tokenizer.json"), "has no tokenizer"),
        (_without("chat_template.jinja"), "has no chat template"),
    ],
)
def test_a_folder_that_is_no_model_is_told_before_anything_starts(
    folder: Path, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    harm(broken)
    (problem,) = source(tmp_path).check(str(broken))
    assert problem.path == "pretrain"
    assert "Fix:" in problem.text
    with pytest.raises(ConfigError, match=message):
        source(tmp_path).prepare(str(broken))


def test_a_file_and_nothing_at_all_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a model folder"):
        source(tmp_path).prepare(str(tmp_path / "weights.bin"))
    with pytest.raises(ConfigError, match="'' is no model"):
        source(tmp_path).prepare("")


def test_a_hub_id_that_cannot_be_fetched_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert source(tmp_path).check("some/model") == []
    with pytest.raises(
        MachineError,
        match=(
            r"^pretrain: 'some/model' is no folder here and could not be fetched as a hub id: no route to host Fix:.*$"
        ),
    ):
        source(tmp_path).prepare("some/model")


def test_a_hub_id_is_fetched_and_checked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(folder))
    assert source(tmp_path).prepare("some/model") == folder
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(tmp_path))
    with pytest.raises(ConfigError, match=r"some/model \(.*\) is not a model folder"):
        source(tmp_path).prepare("some/model")


def test_a_missing_path_under_a_folder_that_is_here_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "is not there" in source(tmp_path).check("models/qwen")[0].text


def test_the_tokenizer_learns_only_what_the_chat_template_shows(tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor"
        " %}<|im_start|>assistant"
    )
    told = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "lake"},
        {"role": "assistant", "content": "Left"},
    ]
    for shown, options in ((False, {"chat_template": template}), (True, {})):
        source = HfModelSource(None, ModelSourceContext(cache=tmp_path, texts=lambda: told))
        folder = source.prepare({"recipe": {"hidden_size": 16, "num_heads": 2, "num_layers": 1, **options}})
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        assert {"lake", "Left"} <= set(vocabulary)
        assert ("rules" in vocabulary) == shown
