"""Tokenizers for tiny models, trained on the environments' own texts: one token a word, or byte-level BPE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from turnwise.contracts.chat import Message
from turnwise.errors import ConfigError, MachineError
from turnwise_hf.config import Recipe

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE, VIDEO, VISION_START, VISION_END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
UNKNOWN = "<unk>"
CHATML = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{%"
    " endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{"
    " message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image'"
    " %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif"
    " %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = r" ?[^\W\d_]+| ?\d| ?[^\w\s]| ?_|\s"
"""A word, a digit or a mark, each with the space before it; any other white space alone. Every character is in exactly one piece."""
_CUT = pre_tokenizers.Split(Regex(_WORDS), "isolated")
_ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")


def build_tokenizer(recipe: Recipe, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer with its chat template. Equal recipes and sets of texts give equal tokenizers. Raises
    ConfigError."""
    template = template_of(recipe)
    vision = (IMAGE, VIDEO, VISION_START, VISION_END) if recipe.architecture == "qwen2_5_vl" else ()
    special = list(dict.fromkeys([END_OF_TEXT, START, END, *vision, *_SPECIAL.findall(template)]))
    # Sorted and without copies: the order in which episodes were played must not matter.
    corpus = sorted(set(texts)) + _template_texts(template, special)
    backend = (
        _word_level(corpus, special) if recipe.tokenizer == "word" else _byte_bpe(corpus, special, recipe.vocab_size)
    )
    # The end of a turn ends a response; a template that writes no <|im_end|> leaves the end of the text.
    options: dict[str, Any] = {"eos_token": END if END in template else END_OF_TEXT, "pad_token": END_OF_TEXT}
    if recipe.tokenizer == "word":
        options["unk_token"] = UNKNOWN
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=recipe.max_position_embeddings, **options
    )
    tokenizer.chat_template = template
    return tokenizer


def template_of(recipe: Recipe) -> str:
    """The recipe's chat template, or ChatML, with images where the architecture sees them."""
    return recipe.chat_template or (VISION_CHATML if recipe.architecture == "qwen2_5_vl" else CHATML)


def shown_texts(recipe: Recipe, messages: Iterable[Message]) -> set[str]:
    """The texts of `messages` whose role the recipe's chat template shows."""
    template = template_of(recipe)
    probe = "turnwise"
    shown = {role for role in _ROLES if any(probe in text for text in _rendered(template, role, probe))}
    return {message["content"] for message in messages if message["role"] in shown}


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template into `folder`, for a model beside them whose
    config.json is written.

    For some architectures (qwen2) `AutoTokenizer` of transformers 5 ignores the class that a folder names and rebuilds
    the architecture's own pipeline around the vocabulary, which loses words. An `auto_map` switches that off; it names
    no code.
    """
    tokenizer.save_pretrained(folder)
    if not is_same_tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), tokenizer):
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(
            json.dumps({**settings, "auto_map": {"AutoTokenizer": [None, None]}}, indent=2), encoding="utf-8"
        )
    if not is_same_tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), tokenizer):
        raise MachineError(
            "this version of transformers does not load the recipe's tokenizer as it was saved. Fix:"
            " transformers>=5.16.1,<5.20"
        )


def is_same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two fast tokenizers cut text by the same pipeline."""
    return _pipeline(one) == _pipeline(other)


def _pipeline(tokenizer: Any) -> list[Any]:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return [content[part] for part in ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens")]


def pieces(text: str) -> list[str]:
    """The words, digits, marks and spaces of `text`, as the word tokenizer cuts it; joined they are the text."""
    return [piece for piece, _ in _CUT.pre_tokenize_str(text)]


def _word_level(corpus: Sequence[str], special: Sequence[str]) -> Tokenizer:
    cut = re.compile("|".join(map(re.escape, special)))
    # White space alone is always known: every template separates with it.
    seen = {piece for text in corpus for part in cut.split(text) for piece in pieces(part)} | {"\n", " "}
    # A number that the few played episodes did not show is no unknown word: digits come in tens.
    for space in ("", " "):
        if any(f"{space}{digit}" in seen for digit in range(10)):
            seen |= {f"{space}{digit}" for digit in range(10)}
    vocabulary = {token: index for index, token in enumerate([*special, UNKNOWN, *sorted(seen)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = _CUT
    # Pieces hold their spaces: joined as they are, they are the text.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [*special, UNKNOWN]])
    return tokenizer


def _byte_bpe(corpus: Sequence[str], special: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # No space before the first word: decoding has to give back the very text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _template_texts(template: str, special: Sequence[str]) -> list[str]:
    """What the template itself writes around messages of every role that it takes."""
    texts = [*_ROLES, *(text for role in _ROLES for text in _rendered(template, role, ""))]
    return [text for text in texts if text not in special]


def _rendered(template: str, role: str, content: str) -> list[str]:
    """A conversation whose last message has this role, rendered; nothing if the template refuses the role. Raises
    ConfigError for the user's."""
    # Only the template is wanted: it is rendered without any vocabulary.
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)))
    # A conversation that templates accept: a system message first, an assistant's after a user's.
    before = [] if role in ("user", "system") else [{"role": "user", "content": ""}]
    after = [{"role": "user", "content": ""}] if role == "system" else []
    conversation = [*before, {"role": role, "content": content}, *after]
    try:
        return [
            blank.apply_chat_template(conversation, chat_template=template, add_generation_prompt=True, tokenize=False)
        ]
    except Exception as error:  # a template may refuse a role with any error; one that refuses the user is of no use
        if role == "user":
            raise ConfigError(
                f"$.pretrain.recipe.chat_template: cannot render a user's message: {error}. Fix: a template that can"
            ) from error
        return []
