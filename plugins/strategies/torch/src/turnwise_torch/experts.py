"""A model's tensors as its checkpoints have them: transformers fuses a layer's experts on loading, files and engines
have them one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from turnwise.errors import EngineError
from turnwise_torch.stream import Bucket, units


def to_checkpoint(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`named` tensors of `model`'s state dict, a decoder layer's together, as transformers' save_pretrained writes
    them, to the bit.

    Those of a model that transformers loads as its files are (names aside) pass as they come; of others no more than
    one layer is held.
    """
    rules = _rules(model)
    if not rules:
        yield from named
        return
    for unit in units(named):
        tensors = dict(unit)
        # Whoever cut the units still holds this list: without it a layer would stay beside its converted form.
        unit.clear()
        yield from _reverted(model, rules, tensors).items()


class CheckpointForm:
    """What a checkpoint of `model` holds, and the way from there into the model. Raises EngineError for a model of
    which transformers cannot say it."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._rules = model, _rules(model)
        # Names and shapes are all that is asked for: on the meta device the conversion costs no memory.
        own = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        stored = _reverted(model, self._rules, own) if self._rules else own
        self._renamings = [rule for rule in self._rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]
        self._place = {name: rename_source_key(name, self._renamings, self._converters) for name in stored}
        self._parts: dict[str, set[str]] = {}
        for name, (target, _) in self._place.items():
            self._parts.setdefault(target, set()).add(name)
        self.needs: dict[str, list[str]] = {}
        """Of every tensor of the state dict the names that it is made of, in a checkpoint."""
        shapes = {}
        for parts in self._parts.values():
            for name, tensor in self._made({part: stored[part] for part in parts}):
                self.needs[name], shapes[name] = sorted(parts, key=dot_natural_key), tensor.shape
        if shapes != {name: tensor.shape for name, tensor in own.items()}:
            raise EngineError(
                f"transformers cannot turn the weights of {type(model).__name__} back into those of its checkpoints"
            )
        self.shapes: dict[str, torch.Size] = {name: tensor.shape for name, tensor in own.items()}
        """Of every name that may come: a checkpoint's, and the state dict's own."""
        self.shapes |= {name: tensor.shape for name, tensor in stored.items()}

    def own(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the state dict that a bucket makes up; a name of the state dict itself stands for the whole.
        The names are known.

        Raises EngineError: a part of a fused tensor comes without the rest.
        """
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in bucket:
            if name in self._place:
                groups.setdefault(self._place[name][0], {})[name] = tensor
            else:
                yield name, tensor
        for target, tensors in groups.items():
            if lacking := self._parts[target] - tensors.keys():
                beside = f"such as {min(lacking)!r} beside {min(tensors)!r}"
                raise EngineError(f"the trainer's weights lack {len(lacking)} of the model's tensors, {beside}")
            yield from self._made(tensors)

    def _made(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What the tensors that belong together become in the model."""
        names = sorted(tensors, key=dot_natural_key)
        target, pattern = self._place[names[0]]
        if pattern is None:
            yield target, tensors[names[0]]
            return
        # A rule collects the tensors that it is given: every use takes a fresh one.
        rule: Any = deepcopy(next(rule for rule in self._converters if pattern in rule.source_patterns))
        for name in names:
            rule.add_tensor(target, name, self._place[name][1], tensors[name])
        for name, made in rule.convert(target, model=self._model, config=self._model.config).items():
            yield name, made[0] if isinstance(made, list) else made


def _rules(model: nn.Module) -> list[Any]:
    """What transformers does to a checkpoint of the model on loading; nothing if it but renames tensors: engines know
    those names too."""
    named: Any = model
    rules = [
        # Legacy names (LayerNorm's gamma and beta) occur in old files alone, and none is written here.
        rule
        for rule in get_model_conversion_mapping(named, add_legacy=False)
        if not isinstance(rule, PrefixChange)
    ]
    return rules if any(isinstance(rule, WeightConverter) for rule in rules) else []


def _reverted(model: nn.Module, rules: list[Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # The rules of the architecture in place of those that loading left in the model: a folder of fused tensors leaves
    # none.
    stand_in: Any = SimpleNamespace(_weight_conversions=deepcopy(rules), config=model.config)
    return revert_weight_conversion(stand_in, tensors)
