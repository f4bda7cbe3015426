"""The implementation under test: how a contract test builds it, and what its author supplied for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import pytest

from turnwise.declared import Record, declared
from turnwise.errors import PluginError
from turnwise.plugins import Entry, registry


class Subject:
    """One entry of the registry with its fixtures.

    `Implementation.fixtures` is a function without arguments that returns a dictionary with any of these keys:
    `config`: the structured options, or a mapping of them. `context`: the context of its kind. `env_config`: an
    environment's options. `actions`: texts to play an environment with, where its `info` names none. `samplers`: names
    of the further models that a manager asks. `reference_logprobs(ids, temperature)`: float32 log-probs of tokens
    1…n−1 of `ids` int32 [n] by a method that is known to be right (an entry for token 0 may stand before them).
    `vocab_size`: ids below it are valid (64). `atol`: the tolerance of log-probs (1e-3). `lr`: a learning rate that
    moves the weights (1e-3). `request(seed)`: a request for a backend that takes messages. `backend`: a backend that is
    already built. `offer(version)`: weights for a backend to receive, those of `reference_logprobs`; `other_offer(version)`
    and `other_logprobs(ids, temperature)`: others, far from them. `pretrain` and `texts`: what a model source prepares,
    and texts that its chat can write.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __repr__(self) -> str:
        return f"{self.entry.kind} {self.entry.name!r}"

    @cached_property
    def supplied(self) -> Mapping[str, Any]:
        """What the author's fixture function returned (nothing without one)."""
        function: Callable[[], Mapping[str, Any]] | None = self.entry.fixtures()
        return {} if function is None else function()

    def need(self, name: str) -> Any:
        """A supplied value; without it the test is skipped with the reason."""
        if name not in self.supplied:
            pytest.skip(
                f"{self!r} has no fixture {name!r}. Fix: Implementation(…, fixtures='module:function') with that key."
            )
        return self.supplied[name]

    def environment(self) -> Any:
        """A new environment with the supplied `env_config`."""
        # A copy: one function's dictionary serves all tests.
        options = dict(self.supplied.get("env_config", {}))
        try:
            registry().check_options(self.entry, options)
        except PluginError as error:
            pytest.skip(f"{error} Fix: Implementation(…, fixtures='module:function') with the key 'env_config'.")
        return registry().build("environment", self.entry.name, options)

    def build(self, context: Any) -> Any:
        """Built with the supplied `config` (default options without one)."""
        return registry().build(self.entry.kind, self.entry.name, self.config, context)

    def capabilities(self, record: type[Record]) -> Record:
        """What it declares, built so."""
        return declared(record, self.entry.name, self.config)

    def transports(self, context: Any) -> tuple[str, ...]:
        """Those of a strategy or backend, built so."""
        found: tuple[str, ...] = self.entry.target().transports(self.config, context)
        return found

    @cached_property
    def config(self) -> Any:
        """Its options, structured: the supplied ones, or the defaults."""
        config, config_class = self.supplied.get("config"), self.entry.config_class()
        if config_class is None or isinstance(config, config_class):
            return config
        try:
            return config_class(**(config or {}))
        except TypeError as error:
            pytest.skip(f"{self!r}: {error}. Fix: Implementation(…, fixtures='module:function') with the key 'config'.")
