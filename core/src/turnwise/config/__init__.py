"""The configuration: schema, YAML loading, strict conversion, translation of the field's keys, and the report of every
error."""

from turnwise.config.convert import to_plain
from turnwise.config.loader import Loaded, load
from turnwise.config.schema import Choice, RunConfig

__all__ = ["Choice", "Loaded", "RunConfig", "load", "to_plain"]
