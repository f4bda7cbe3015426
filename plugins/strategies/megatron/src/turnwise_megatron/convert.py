"""Weights between Hugging Face folders and this rank's part of a Megatron model: read slice by slice, gathered tensor
by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from turnwise.errors import CheckpointError
from turnwise_megatron.architecture import Architecture
from turnwise_megatron.parallel import Parallel
from turnwise_torch.models import VALUE_HEAD_FILE, first_line

Kind = Literal["whole", "rows", "columns", "vocabulary", "gate", "qkv"]
VALUE_HEAD = ("value_head.weight", "value_head.bias")
_EXPERT = re.compile(r"(?P<layer>.*\.experts\.)(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@frozen
class Entry:
    """One Megatron parameter of a stage: `name` in that stage's model, how tensor parallelism cuts it, and the HF
    tensors that it is made of.

    A parameter of an expert is another expert's on every expert parallel rank: `sources` are those of all ranks, one
    rank after the other.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...]
    expert: bool = False

    def sources_of(self, rank: int, size: int) -> tuple[str, ...]:
        """Those of one of `size` expert parallel ranks."""
        if not self.expert:
            return self.sources
        each = len(self.sources) // size
        return self.sources[rank * each : (rank + 1) * each]


def stage_entries(
    architecture: Architecture, layers: range, first: bool, last: bool, value: bool, expert_parallel: int
) -> Iterator[Entry]:
    """The parameters of a pipeline stage with the model's `layers`, in Hugging Face's order; experts by the names of
    checkpoints, one by one."""
    if first:
        yield Entry("embedding.word_embeddings.weight", "vocabulary", ("model.embed_tokens.weight",))
    for here, layer in enumerate(layers):
        ours, theirs = f"decoder.layers.{here}.", f"model.layers.{layer}."
        attention = f"{theirs}self_attn."
        for part in ("weight", "bias") if architecture.qkv_bias else ("weight",):
            yield Entry(
                f"{ours}self_attention.linear_qkv.{part}", "qkv", tuple(f"{attention}{x}_proj.{part}" for x in "qkv")
            )
        yield Entry(f"{ours}self_attention.linear_proj.weight", "columns", (f"{attention}o_proj.weight",))
        if architecture.qk_norm:
            for x in "qk":
                yield Entry(f"{ours}self_attention.{x}_layernorm.weight", "whole", (f"{attention}{x}_norm.weight",))
        if count := architecture.experts_in(layer):
            yield from _expert_entries(f"{ours}mlp.", f"{theirs}mlp.", count, expert_parallel)
        else:
            yield Entry(
                f"{ours}mlp.linear_fc1.weight", "gate", (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")
            )
            yield Entry(f"{ours}mlp.linear_fc2.weight", "columns", (f"{theirs}mlp.down_proj.weight",))
        yield Entry(f"{ours}input_layernorm.weight", "whole", (f"{theirs}input_layernorm.weight",))
        yield Entry(f"{ours}pre_mlp_layernorm.weight", "whole", (f"{theirs}post_attention_layernorm.weight",))
    if last:
        yield Entry("decoder.final_layernorm.weight", "whole", ("model.norm.weight",))
        if value:
            yield from (Entry(name, "whole", (name,)) for name in VALUE_HEAD)
        else:
            yield Entry(
                "output_layer.weight",
                "vocabulary",
                ("model.embed_tokens.weight" if architecture.tied else "lm_head.weight",),
            )


def _expert_entries(ours: str, theirs: str, count: int, expert_parallel: int) -> Iterator[Entry]:
    yield Entry(f"{ours}router.weight", "whole", (f"{theirs}gate.weight",))
    here = count // expert_parallel
    for local in range(here):
        # Megatron gives a rank consecutive experts: its local number counts within them.
        experts = [f"{theirs}experts.{rank * here + local}." for rank in range(expert_parallel)]
        up = tuple(f"{expert}{x}_proj.weight" for expert in experts for x in ("gate", "up"))
        yield Entry(f"{ours}experts.local_experts.{local}.linear_fc1.weight", "gate", up, expert=True)
        down = tuple(f"{expert}down_proj.weight" for expert in experts)
        yield Entry(f"{ours}experts.local_experts.{local}.linear_fc2.weight", "columns", down, expert=True)


class FusedExpert:
    """A slice of one expert's matrix, where a layer's experts are stored as one tensor [experts, rows, columns], as
    transformers holds them."""

    def __init__(self, whole: Any, expert: int, start: int, rows: int) -> None:
        self._whole, self._expert, self._start, self._rows = whole, expert, start, rows

    def get_shape(self) -> list[int]:
        return [self._rows, self._whole.get_shape()[2]]

    def __getitem__(self, place: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = place if isinstance(place, tuple) else (place, slice(None))
        start, end, _ = rows.indices(self._rows)
        return self._whole[self._expert : self._expert + 1, self._start + start : self._start + end, columns][0]


class Folder:
    """The safetensors files of a model folder: whole tensors' shapes and any slice of them. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        try:
            index = folder / "model.safetensors.index.json"
            names = (
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                if index.is_file()
                else {"model.safetensors"}
            )
            if (folder / VALUE_HEAD_FILE).is_file():
                names.add(VALUE_HEAD_FILE)
            for name in sorted(names):
                opened = safe_open(folder / name, "pt")
                prefix = "value_head." if name == VALUE_HEAD_FILE else ""
                self._files |= {prefix + key: (opened, key) for key in opened.keys()}  # noqa: SIM118 (a handle, not a mapping)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot read the weights in {folder}: {first_line(error)}. Fix: fetch or export the folder again"
            ) from error

    def __contains__(self, name: str) -> bool:
        return self._found(name) is not None

    def slice(self, name: str) -> Any:
        """A tensor to take slices of; `.get_shape()` is its whole shape."""
        found = self._found(name)
        if found is not None:
            return found[0].get_slice(found[1])
        expert = _EXPERT.fullmatch(name)
        fused = expert and self._found(
            f"{expert['layer']}{'down_proj' if expert['part'] == 'down' else 'gate_up_proj'}"
        )
        if not expert or not fused:
            raise CheckpointError(
                f"the model in {self.folder} lacks the weight {name!r}. Fix: fetch or export the folder again"
            )
        whole = fused[0].get_slice(fused[1])
        # gate and up lie one below the other in gate_up_proj.
        rows = whole.get_shape()[1] if expert["part"] == "down" else whole.get_shape()[1] // 2
        return FusedExpert(whole, int(expert["number"]), rows if expert["part"] == "up" else 0, rows)

    def _found(self, name: str) -> tuple[Any, str] | None:
        # A backbone's names have no prefix.
        return self._files.get(name) or self._files.get(name.removeprefix("model."))


def load(
    model: nn.Module, entries: Sequence[Entry], folder: Folder, architecture: Architecture, parallel: Parallel
) -> None:
    """Copy this rank's part of every entry into `model`, cast to its dtype. A critic without a saved value head starts
    from zeros."""
    parameters = dict(model.named_parameters())
    # On the last of several stages a tied output layer is a parameter of its own, and has to be filled as well.
    tied_here = "output_layer.weight" not in parameters
    with torch.no_grad():
        for entry in entries:
            if entry.name == "output_layer.weight" and tied_here:
                continue  # the first stage's embedding serves
            parameter = parameters.pop(entry.name)
            if entry.sources[0] in VALUE_HEAD and entry.sources[0] not in folder:
                parameter.zero_()
                continue
            experts = parallel.experts
            slices = [folder.slice(name) for name in entry.sources_of(experts.rank, experts.size)]
            place = (
                (experts.tensor, experts.tensor_size) if entry.expert else (parallel.tensor, parallel.sizes["tensor"])
            )
            part = _cut(entry.kind, slices, architecture, *place)
            if part.shape != parameter.shape:
                raise CheckpointError(
                    f"the weight {entry.sources[0]!r} in {folder.folder} does not have the shape that its config.json"
                    " gives. Fix: export it again"
                )
            parameter.copy_(part)
    assert not parameters, sorted(parameters)


def _cut(kind: Kind, slices: Sequence[Any], architecture: Architecture, rank: int, size: int) -> Tensor:
    if kind == "whole":
        return slices[0][:]
    if kind == "columns":
        width = slices[0].get_shape()[1] // size
        return slices[0][:, rank * width : (rank + 1) * width]
    if kind == "vocabulary":
        rows, hidden = slices[0].get_shape()
        height = architecture.padded_vocabulary(size) // size
        part = slices[0][min(rank * height, rows) : min((rank + 1) * height, rows)]
        # Rows that pad the vocabulary: their logits are masked (see logprobs.NEVER), their values count nowhere.
        return torch.cat([part, part.new_zeros(height - len(part), hidden)])
    parts = []
    for whole in slices:
        height = whole.get_shape()[0] // size
        parts.append(whole[rank * height : (rank + 1) * height])
    # Megatron keeps the queries of a group beside its key and its value.
    if kind == "qkv":
        groups = architecture.groups // size
        parts = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(parts, 1).flatten(0, 1)
    # gate: this rank's rows of both matrices, one below the other, as Megatron's fc1 cuts them.
    return torch.cat(parts)


def _join(kind: Kind, parts: Sequence[Tensor], architecture: Architecture) -> list[Tensor]:
    if kind == "whole":
        return [parts[0]]
    if kind == "columns":
        return [torch.cat(list(parts), 1)]
    if kind == "vocabulary":
        return [torch.cat(list(parts))[: architecture.vocabulary]]
    if kind == "gate":
        return [torch.cat([part.chunk(2)[which] for part in parts]) for which in (0, 1)]
    # qkv, undone: each group is its queries, one key and one value.
    size, each = architecture.head_dim, architecture.heads // architecture.groups
    groups = architecture.groups // len(parts)
    cuts = [
        part.reshape(groups, (each + 2) * size, *part.shape[1:]).split([each * size, size, size], 1) for part in parts
    ]
    return [torch.cat([cut[which].flatten(0, 1) for cut in cuts]) for which in (0, 1, 2)]


def gathered(
    model: nn.Module,
    stages: Sequence[Sequence[Entry]],
    architecture: Architecture,
    parallel: Parallel,
    shape: Callable[[str], Sequence[int]],
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under their Hugging Face names on rank 0, one parameter at a time; tied ones under every name.

    The pipeline, the tensor and the expert parallel ranks of rank 0 take part and are to iterate as well; they and all
    others get nothing. `shape` returns the whole shape of a Hugging Face tensor, which another stage sends.
    """
    parameters = dict(model.named_parameters())
    like = next(iter(parameters.values()))
    embedding: Tensor | None = None
    for stage, entries in enumerate(stages):
        for entry in entries:
            if entry.name == "output_layer.weight" and architecture.tied:
                if parallel.rank == 0 and embedding is not None:
                    yield "lm_head.weight", embedding
                continue
            whole = (
                _whole(parameters[entry.name].detach(), entry, architecture, parallel)
                if stage == parallel.pipeline
                else []
            )
            # Of a stage one process has the whole tensors, and it alone sends them to rank 0.
            if parallel.tensor or parallel.replica:
                continue
            if stage and stage == parallel.pipeline:
                for tensor in whole:
                    dist.send(tensor.contiguous(), parallel.pipeline_ranks[0], group=parallel.pipeline_group)
            if parallel.rank:
                continue
            if stage:
                for name in entry.sources:
                    whole.append(torch.empty(tuple(shape(name)), dtype=like.dtype, device=like.device))
                    dist.recv(whole[-1], parallel.pipeline_ranks[stage], group=parallel.pipeline_group)
            # Kept until its second name is due, at the end of the last stage.
            if architecture.tied and entry.kind == "vocabulary":
                embedding = whole[0]
            yield from zip(entry.sources, whole)


def _whole(parameter: Tensor, entry: Entry, architecture: Architecture, parallel: Parallel) -> list[Tensor]:
    """The HF tensors of a parameter on the first of the ranks that share it; on the others, and those that hold the
    same again, nothing."""
    experts = parallel.experts
    if experts.replica if entry.expert else parallel.replica:
        return []
    group, size = (
        (experts.group, experts.tensor_size) if entry.expert else (parallel.tensor_group, parallel.sizes["tensor"])
    )
    if entry.kind == "whole":
        return [parameter] if parallel.tensor == 0 else []
    parts: list[Tensor] | None = [parameter]
    if group.size() > 1:
        parts = [torch.empty_like(parameter) for _ in range(group.size())] if group.rank() == 0 else None
        dist.gather(parameter.contiguous(), parts, group=group, group_dst=0)
    if parts is None:
        return []
    # The group holds an expert's parts one after the other: `size` of them make one.
    return [
        whole
        for start in range(0, len(parts), size)
        for whole in _join(entry.kind, parts[start : start + size], architecture)
    ]
