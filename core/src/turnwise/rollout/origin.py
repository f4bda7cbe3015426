"""Where in the own code of an environment, or of a manager, an error was raised: what its author looks for first."""

from __future__ import annotations

import traceback
from pathlib import Path

from turnwise.errors import one_line

_CORE = Path(__file__).resolve().parent.parent
_PYTHON = Path(traceback.__file__).parent


def raised(error: BaseException) -> str:
    """`raised Type: message, at FILE:LINE in FUNCTION`, the innermost frame of the code that was called from here.

    That code is the package (or the single file) of the first frame outside the core and Python's own library, through
    which the core may call (an event loop); a library that it calls itself is not where to look.
    """
    frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    outside = [(path, frame) for path, frame in frames if _CORE not in path.parents and not _is_pythons(path)]
    # The kit's fakes are the core's own.
    outside = outside or [(path, frame) for path, frame in frames if path.parent.name != "rollout"]
    if not outside:
        return f"raised {one_line(error)}"
    root = _root(outside[0][0])
    _, frame = [one for one in outside if one[0] == root or root in one[0].parents][-1]
    return f"raised {one_line(error)}, at {frame.filename}:{frame.lineno} in {frame.name}"


def _is_pythons(path: Path) -> bool:
    return _PYTHON in path.parents and not {"site-packages", "dist-packages"} & set(path.parts)


def _root(path: Path) -> Path:
    """The topmost package that holds a file, or the file itself."""
    root = path
    while (root.parent / "__init__.py").is_file():
        root = root.parent
    return root
