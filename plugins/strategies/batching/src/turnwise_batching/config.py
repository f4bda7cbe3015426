"""The policies have no options: what they need is in their context."""

from __future__ import annotations

from attrs import frozen


@frozen
class NoOptions:
    """No option at all."""
