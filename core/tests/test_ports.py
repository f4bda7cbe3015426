"""A port that is given to another process is still free when that process listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from turnwise import ports
from turnwise.ports import free_port


def test_a_port_is_free_and_not_one_that_the_system_hands_out() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert port < first
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    with socket.create_server((host, free_port(host))) as taken:
        monkeypatch.setattr(ports, "LOWEST", taken.getsockname()[1])
        monkeypatch.setattr(ports, "HIGHEST", taken.getsockname()[1])
        with pytest.raises(OSError, match="no free port"):
            free_port(host)
