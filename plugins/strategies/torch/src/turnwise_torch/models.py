"""Loading models from a folder in Hugging Face layout: a causal language model, or its backbone with a value head."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as hf_logging

from turnwise.errors import CheckpointError, TrainerError, did_you_mean, listed, one_line
from turnwise_torch.guard import is_out_of_memory
from turnwise_torch.microbatch import MicroBatch, plain
from turnwise_torch.packing import Packing, packed_mask, varlen
from turnwise_torch.vision import embedded, has_vision

log = logging.getLogger("turnwise")

VALUE_HEAD_FILE = "value_head.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a configuration name. Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}.{did_you_mean(name, DTYPES)} Known: {listed(DTYPES)}")
    return DTYPES[name]


def load_causal_lm(folder: Path, dtype: str, attn_implementation: str, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model in `folder`, on the CPU, in evaluation mode, parameters in `dtype` (bf16, fp16, fp32,
    fp64).

    Raises CheckpointError if the folder is missing, is not a model, lacks weights of the model or holds those of
    another, holds weights that are not finite, or needs Python code of its own that is not to run
    (`trust_remote_code`).
    """
    auto = AutoModelForImageTextToText if has_vision(folder) else AutoModelForCausalLM
    return _load(auto, folder, dtype, attn_implementation, trust_remote_code)


class ValueModel(nn.Module):
    """A backbone and a linear layer: one number per position, the value of the prefix that ends there."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        like = next(backbone.parameters())
        self.value_head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, dtype=like.dtype)  # type: ignore[union-attr,arg-type,operator]
        # Zeros: the first values are 0, whatever the seed, and the first gradient reaches the head alone.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)


def load_value_model(folder: Path, dtype: str, attn_implementation: str, trust_remote_code: bool = False) -> ValueModel:
    """The backbone in `folder` with a value head: that of an exported critic if the folder has one, else zeros. Errors
    as `load_causal_lm`."""
    model = ValueModel(_load(AutoModel, folder, dtype, attn_implementation, trust_remote_code))
    saved = Path(folder) / VALUE_HEAD_FILE
    if saved.is_file():
        try:
            model.value_head.load_state_dict(load_file(saved))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot read the value head {saved}: {first_line(error)}") from error
    return model


def backbone_of(model: nn.Module) -> nn.Module:
    """The part of the model that gives hidden states: `ValueModel.backbone`, or transformers' `base_model`."""
    return model.backbone if isinstance(model, ValueModel) else model.base_model  # type: ignore[return-value]


def hidden_states(model: nn.Module, batch: MicroBatch) -> Tensor:
    """[b, w, hidden]: the last hidden states of a micro-batch's right-padded rows.

    No attention mask without packing: under causal attention no real token ever sees padding that stands to its right.
    With it a mask that is causal within each sample, or, under flash attention, positions that begin again, by which
    transformers keeps the samples apart.
    """
    backbone, ids, packing = backbone_of(model), batch.input_ids, batch.packing
    pixels, mask = batch.pixels, batch.image_mask
    # In the order in which other ranks run the tower: sharded parameters are gathered by all at once.
    if batch.beside is not None:
        pixels, mask = batch.beside, torch.zeros_like(ids, dtype=torch.bool)
    if pixels is not None:
        assert mask is not None
        embeddings, places, _ = embedded(backbone, ids, pixels, mask)
        return backbone(inputs_embeds=embeddings, position_ids=places, use_cache=False).last_hidden_state
    if packing is None:
        return backbone(input_ids=ids, use_cache=False).last_hidden_state
    mask = (
        None
        if varlen(attention_of(model))
        else packed_mask(packing, attention_of(model), next(model.parameters()).dtype)
    )
    return backbone(
        input_ids=ids, attention_mask=mask, position_ids=packing.position_ids, use_cache=False
    ).last_hidden_state


def attention_of(model: nn.Module) -> str:
    """The attention implementation that the model was loaded with."""
    return str(backbone_of(model).config._attn_implementation)  # type: ignore[union-attr]


def check_packing(model: nn.Module) -> None:
    """Raise TrainerError if packed samples could see each other, or would not see all of themselves: sliding, chunked
    or linear attention."""
    backbone = backbone_of(model)
    config: Any = backbone.config
    # Where a configuration lists its layers' types, transformers goes by these; sliding_window says it for the others.
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    others += (
        ["sliding_attention"]
        if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
        else []
    )
    if others or not _packs(model):
        what = f"has layers of {listed(others)}" if others else "does not keep packed samples apart"
        raise TrainerError(
            f"{type(model).__name__} {what}, and packing needs full attention that takes a mask. Fix:"
            " use_sequence_packing: false for this role"
        )


def _packs(model: nn.Module) -> bool:
    """Whether two samples in one row have the hidden states that they have alone."""
    device = next(model.parameters()).device
    # Of different lengths and contents: samples that see each other then differ from what they are alone.
    first, second = (
        torch.arange(5, device=device)[None] % vocabulary(model),
        torch.arange(3, 10, device=device)[None] % vocabulary(model),
    )
    sizes = (first.shape[1], second.shape[1])
    places = torch.cat([torch.arange(size, device=device) for size in sizes])[None]
    segments = torch.cat([torch.full((size,), number, device=device) for number, size in enumerate(sizes)])[None]
    with torch.no_grad():
        alone = torch.cat([hidden_states(model, plain(ids)) for ids in (first, second)], 1).float()
        try:
            both = evolve(plain(torch.cat([first, second], 1)), packing=Packing(places, segments))
            together = hidden_states(model, both).float()
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            # The backbone takes no positions, or no mask of this shape.
            return False
    # Room for the rounding of bf16, in which attention over a longer row sums in another order.
    return float((together - alone).norm()) <= 0.02 * float(alone.norm())


def check_head(model: nn.Module) -> None:
    """Raise TrainerError if the model's logits are more than its LM head over its last hidden states (soft-capping,
    scaling)."""
    # Small logits would hide it from the comparison below.
    capped = getattr(model.config, "final_logit_softcapping", None)
    ids = torch.arange(4, device=next(model.parameters()).device)[None] % vocabulary(model)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits.float()
        ours = model.get_output_embeddings()(hidden_states(model, plain(ids))).float()  # type: ignore[operator]
    if capped is not None or not torch.allclose(whole, ours, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
        raise TrainerError(
            f"{type(model).__name__} changes its logits after the LM head, which the chunked head does not reproduce:"
            " log-probs would be wrong"
        )


def tied_names(model: nn.Module) -> set[str]:
    """State-dict names whose tensor stands there under an earlier name too, such as `lm_head.weight` of tied
    embeddings."""
    seen: set[int] = set()
    tied = set()
    # Without keep_vars every entry would be a tensor object of its own, and no two of them the same.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            tied.add(name)
        seen.add(id(tensor))
    return tied


def vocabulary(model: nn.Module) -> int:
    """The number of rows of the input embedding: ids must be smaller."""
    return backbone_of(model).get_input_embeddings().num_embeddings  # type: ignore[operator]


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Recompute every decoder layer in the backward pass.

    The layers are wrapped instead of switching transformers' own flag, which needs training mode (dropout) and drops
    the KV cache of a sampler that shares the module in another thread. The wrapper acts where gradients are enabled,
    and that is a property of the thread.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise TrainerError(
            f"{type(model).__name__} has no layers to checkpoint. Fix: set model_args.disable_gradient_checkpointing:"
            " true for this role"
        )
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Evaluation mode draws no random numbers (no dropout), so there is no random state to bring back.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _load(auto: Any, folder: Path, dtype: str, attn_implementation: str, trust_remote_code: bool) -> nn.Module:
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is not a model folder (it has no config.json). Fix: name a folder in Hugging Face layout as"
            " pretrain"
        )
    options = {
        "dtype": torch_dtype(dtype),
        "attn_implementation": attn_implementation,
        "local_files_only": True,
        "output_loading_info": True,
    }
    # Where it is left out, transformers asks on the terminal.
    options["trust_remote_code"] = trust_remote_code
    try:
        with quiet():
            model, info = auto.from_pretrained(folder, **options)
    # What stands in a broken folder reaches code that expects anything but that.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"cannot load the model in {folder}: {_why(error)}") from error
    _check_loaded(model, info, folder)
    # Without dropout: old and new log-probs of unchanged weights have to be equal.
    return model.eval()


def _why(error: Exception) -> str:
    """The reason and the fix, for a folder that transformers does not load."""
    if refused := untrusted(error):
        return refused
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than config.json says. Fix: the config.json of these weights"
    return f"{one_line(error)}. Fix: fetch or export the folder again, or name another pretrain"


def _check_loaded(model: nn.Module, info: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError if the weights are not this model's: transformers fills what is missing with random values,
    leaves out what fits nowhere, and goes on."""
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"the model in {folder} lacks {len(missing)} weights, the first is {missing[0]!r}. Fix: fetch or export the"
            " folder again"
        )
    # What belongs to no module of the model is another head, or a tower that this class of models does not have.
    own = {name: _belongs(model, name) for name in sorted(info["unexpected_keys"])}
    if strange := [name for name, belongs in own.items() if belongs]:
        raise CheckpointError(
            f"{len(strange)} weights in {folder} fit no parameter of {type(model).__name__}, the first is"
            f" {strange[0]!r}: they are of another architecture. Fix: the config.json of these weights"
        )
    # A backbone alone has no head, whatever the folder's model has.
    whole = hasattr(model, model.base_model_prefix)  # type: ignore[arg-type]
    if beside := [name for name in own if whole or name.startswith(f"{model.base_model_prefix}.")]:
        _say_once(
            f"{folder}: {len(beside)} weights are no part of {type(model).__name__} and stay out, the first is"
            f" {beside[0]!r}"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        # NaN is both the least and the most; one pass, and no memory beside the tensor's.
        if not all(math.isfinite(float(bound)) for bound in torch.aminmax(parameter.detach())):
            raise CheckpointError(
                f"the model in {folder} holds weights that are not finite, the first in {name!r}. Fix: fetch or export"
                " the folder again, or an earlier checkpoint of that run"
            )


def _belongs(model: Any, name: str) -> bool:
    """Whether a weight would be one of a module that this model has, or of its layers, by its name."""
    # A backbone alone; files have its weights as those of a whole model.
    path = name if hasattr(model, model.base_model_prefix) else name.removeprefix(f"{model.base_model_prefix}.")
    modules = {place for place, _ in model.named_modules() if place}
    above, layers, _ = f".{path}".partition(".layers.")
    return path.rpartition(".")[0] in modules or (bool(layers) and f"{above}.layers".removeprefix(".") in modules)


@functools.cache
def _say_once(line: str) -> None:
    """A warning; several roles of a process load the same folder."""
    log.warning(line)


def untrusted(error: BaseException) -> str:
    """What transformers' refusal of a folder's own code means for the user; empty for another error."""
    if "trust_remote_code" not in str(error):
        return ""
    return (
        "it needs Python code of its own, which is not run. Fix: trust_remote_code: true, if you trust whoever wrote it"
    )


def first_line(error: BaseException) -> str:
    """The error's first line, for a message of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _NoReport(logging.Filter):
    """transformers' table of weights that are missing or too many: `_check_loaded` says so in a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is none."""
        return not re.search("LOAD REPORT|checkpoint seem corrupted", record.getMessage())


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers meanwhile, and no report of what was loaded."""
    shown, logger, without = (
        hf_logging.is_progress_bar_enabled(),
        hf_logging.get_logger("transformers.modeling_utils"),
        _NoReport(),
    )
    hf_logging.disable_progress_bar()
    logger.addFilter(without)
    try:
        yield
    finally:
        logger.removeFilter(without)
        if shown:
            hf_logging.enable_progress_bar()
