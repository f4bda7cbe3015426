"""Where processes of a run may meet."""

from __future__ import annotations

import contextlib
import random
import socket

LOWEST, HIGHEST = 21_000, 31_999
"""Below what Linux hands out to those who ask for any port (32768 and up): who is given the number may listen there seconds later."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` (empty: of all of this machine's addresses) where nobody listens; raises OSError where none is
    found."""
    for _ in range(1000):
        # Not the global generator: two processes with the run's seed would try the same ports, and it must not be moved
        # on.
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(f"no free port was found between {LOWEST} and {HIGHEST} on {host or 'this machine'}")
