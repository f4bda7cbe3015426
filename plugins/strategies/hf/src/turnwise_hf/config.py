"""Options of the backend, and the recipe for a tiny local model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args

from attrs import define, field, fields, frozen

from turnwise.contracts.inference import BackendCapabilities
from turnwise.errors import ConfigError, Problem, did_you_mean, listed

Architecture = Literal["qwen2", "qwen3", "qwen3_moe", "llama", "qwen2_5_vl"]
TokenizerKind = Literal["word", "byte_bpe"]
SPECIAL_TOKENS = 3
"""<|endoftext|>, <|im_start|>, <|im_end|>: the special tokens that every byte-level tokenizer of a recipe has."""


@frozen
class HfConfig:
    """`batch_wait`: seconds for which requests are collected when it is not known how many episodes are live (outside a
    run's scheduler)."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(adapters=True, updates_between_tokens=True)
    batch_wait: float = 0.002


@define(frozen=True)
class Recipe:
    """A tiny model made locally. Sizes as transformers names them: `num_kv_heads` None = `num_heads`,
    `intermediate_size` None = three times `hidden_size`, `seed` None = the run's seed. `vocab_size` is that of
    `byte_bpe`; a `word` tokenizer is as large as the texts need.
    `chat_template`: a Jinja template in place of ChatML's. `qwen2_5_vl` sees images of at most `max_pixels`, one token
    per 28 × 28, by a vision tower of as many layers and the same width. In every layer of `qwen3_moe` each token is
    computed by `num_experts_per_tok` of `num_experts` MLPs of width `moe_intermediate_size`, None = `hidden_size`."""

    architecture: Architecture = "qwen2"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    seed: int | None = 0
    tokenizer: TokenizerKind = "word"
    vocab_size: int = 512
    chat_template: str | None = field(default=None, repr=False)
    max_pixels: int = 28 * 28 * 16
    num_experts: int = 4
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None


_INTEGERS = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "max_position_embeddings",
    "vocab_size",
    "max_pixels",
    "num_experts",
    "num_experts_per_tok",
)
_OPTIONAL_INTEGERS = ("num_kv_heads", "intermediate_size", "moe_intermediate_size")


def recipe_from(pretrain: Mapping[str, Any]) -> Recipe:
    """The recipe of a `pretrain` mapping, `{recipe: {…}}` or its fields themselves. Raises ConfigError with every
    mistake at once."""
    if problems := recipe_problems(pretrain):
        raise ConfigError(map(str, problems))
    return Recipe(**(_options(pretrain) or {}))


def recipe_problems(pretrain: Mapping[str, Any]) -> list[Problem]:
    """Every mistake in the recipe of a `pretrain` mapping."""
    options = _options(pretrain)
    if options is None:
        return []
    if not isinstance(options, Mapping):
        text = f"{options!r} is not a mapping. Fix: such as {{architecture: qwen2, hidden_size: 64}}"
        return [Problem("pretrain.recipe", text)]
    known = [attribute.name for attribute in fields(Recipe)]
    problems = [
        Problem(
            f"pretrain.recipe.{key}",
            f"unknown key {key!r}.{did_you_mean(str(key), known)} Known: {listed(known)}. Fix: correct or remove it",
        )
        for key in options
        if key not in known
    ]
    problems += [problem for key, value in options.items() if key in known for problem in _value_problems(key, value)]
    return problems or [
        Problem(f"pretrain.recipe.{key}" if key else "pretrain.recipe", text)
        for key, text in _relations(Recipe(**options))
    ]


def _options(pretrain: Mapping[str, Any]) -> Any:
    return pretrain["recipe"] if set(pretrain) == {"recipe"} else pretrain


def _value_problems(key: str, value: Any) -> Iterator[Problem]:
    wanted = ""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key in _INTEGERS or (key in _OPTIONAL_INTEGERS and value is not None):
        wanted = "" if whole and value > 0 else "a positive integer"
    elif key == "seed":
        wanted = "" if value is None or (whole and value >= 0) else "a non-negative integer, or null for the run's seed"
    elif key == "tie_word_embeddings":
        wanted = "" if isinstance(value, bool) else "true or false"
    elif key == "initializer_range":
        wanted = "" if (whole or isinstance(value, float)) and value > 0 else "a positive number"
    elif key == "chat_template":
        wanted = "" if value is None or isinstance(value, str) else "a Jinja template"
    elif key in ("architecture", "tokenizer"):
        names = get_args(Architecture if key == "architecture" else TokenizerKind)
        wanted = "" if value in names else f"one of {listed(names)}.{did_you_mean(str(value), names)}"
    if wanted:
        yield Problem(f"pretrain.recipe.{key}", f"{value!r} is not {wanted}. Fix: correct the value")


def _relations(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What is wrong between the fields, and at which ("": at several)."""
    # Rotary embeddings turn pairs of numbers: a head is of even width.
    if recipe.hidden_size % (2 * recipe.num_heads):
        sizes = f"hidden_size {recipe.hidden_size} is not an even multiple of num_heads {recipe.num_heads}"
        yield "", f"{sizes}. Fix: such as 64 and 4"
    if recipe.num_kv_heads and recipe.num_heads % recipe.num_kv_heads:
        heads = f"num_heads {recipe.num_heads} is not a multiple of num_kv_heads {recipe.num_kv_heads}"
        yield "", f"{heads}. Fix: such as 4 and 2, or num_kv_heads: null"
    if recipe.max_pixels < 28 * 28:
        yield "max_pixels", f"{recipe.max_pixels} is less than one token's 28 × 28. Fix: at least 784"
    # Its vision tower turns two coordinates, each in pairs.
    if recipe.architecture == "qwen2_5_vl" and recipe.hidden_size // recipe.num_heads % 4:
        width = f"hidden_size {recipe.hidden_size} / num_heads {recipe.num_heads} must be a multiple of 4"
        yield "", f"{width} for qwen2_5_vl. Fix: such as 64 and 4"
    if recipe.num_experts_per_tok > recipe.num_experts:
        experts = f"num_experts_per_tok {recipe.num_experts_per_tok} is more than num_experts {recipe.num_experts}"
        yield "", f"{experts}. Fix: lower the one, or raise the other"
    # A vocabulary without one of the bytes could not write every text.
    smallest = 256 + SPECIAL_TOKENS
    if recipe.tokenizer == "byte_bpe" and recipe.vocab_size < smallest:
        least = f"{recipe.vocab_size} is below {smallest}, all bytes and the special tokens"
        yield "vocab_size", f"{least}. Fix: {smallest} or more"
