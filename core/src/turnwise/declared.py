"""What an implementation declares of itself, read in one way: its record of capabilities, and what its options say of
the whole run."""

from __future__ import annotations

from typing import Any, TypeVar

from turnwise.contracts.capabilities import Capabilities
from turnwise.errors import PluginError, one_line
from turnwise.importing import StrangerError, guarded
from turnwise.plugins import Registry, registry

Record = TypeVar("Record", bound=Capabilities)


# Any: a plugin's options
def declared(record: type[Record], name: str, config: Any = None, among: Registry | None = None) -> Record:
    """The capabilities of the implementation `name` with the options `config` (None: its defaults); those of the record
    where it says nothing.

    A config class that has the attribute speaks alone, and the implementation is not imported. Raises PluginError: it
    is not there, or what it declares is no such record."""
    try:
        with guarded():
            # The config class first: a strategy's own module may import torch, which `turnwise plan` must do without.
            holder = config if hasattr(config, "capabilities") else _holder(record.kind, name, among or registry())
            found = getattr(holder, "capabilities", record())
    except StrangerError as failure:
        if isinstance(failure.error, PluginError):
            # Ours already, with place and fix.
            raise failure.error from failure.error.__cause__
        label = record.kind.replace("_", " ")
        raise PluginError(
            f"{label} {name!r} cannot declare its capabilities: {one_line(failure.error)}. Fix: repair the plugin."
        ) from failure.error
    if not isinstance(found, record):
        raise PluginError(
            f"{record.kind.replace('_', ' ')} {name!r} declares {found!r:.80} as its capabilities, which is no"
            f" {record.__name__}. Fix: repair the plugin."
        )
    return found


# Any: as in `declared`
def declared_if_there(record: type[Record], name: str, config: Any = None, among: Registry | None = None) -> Record:
    """As `declared`; the record's defaults where the implementation cannot be asked.

    For arithmetic and relations between keys, which go on: that it is not there or broken is reported where it is
    named."""
    try:
        return declared(record, name, config, among)
    except PluginError:
        return record()


def _holder(kind: str, name: str, among: Registry) -> Any:
    """What speaks for an implementation with default options: its config class where that has the attribute, else its
    class."""
    entry = among.find(kind, name)
    config_class = entry.config_class()
    return config_class() if config_class is not None and hasattr(config_class, "capabilities") else entry.target()
