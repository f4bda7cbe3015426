"""What an entry point's distribution says of itself: its name, its version, the cores that it wants."""

from __future__ import annotations

import importlib.metadata
import re


def canonical(name: str) -> str:
    """A distribution's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def stem(distribution: str) -> str:
    """The name without the prefix that ours share."""
    return canonical(distribution).removeprefix("turnwise-")


def owner(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """The distribution's name and version; damaged metadata have neither."""
    try:
        return (point.dist.name or "?", point.dist.version or "") if point.dist else ("?", "")
    except Exception:  # an email parser on whatever the file holds
        return "?", ""


def core_range(point: importlib.metadata.EntryPoint) -> str:
    """Why the plugin's requirement on the core does not admit this core, or the empty string."""
    from packaging.requirements import InvalidRequirement, Requirement

    from turnwise import __version__

    for text in (point.dist.requires or ()) if point.dist else ():
        if re.match(r"turnwise(?![\w.-])", text, re.IGNORECASE):
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                return f"its requirement {text!r} cannot be read"
            # Without extras: what only an extra needs is not asked of this core.
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and not requirement.specifier.contains(__version__, prereleases=True):
                return f"needs turnwise{requirement.specifier}, this is {__version__}"
    return ""
