"""Ports on which a test will listen later.

The kernel gives the ports from 32768 on to connections of all processes, at any moment. A test that
picks one of those, and listens on it later, can find it taken.
"""

from __future__ import annotations

import random
import socket

PORTS = range(21_000, 32_768)
_random = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """Return a port of this machine that was free, and that no earlier call has returned."""
    while (port := _random.choice(PORTS)) in _given or not _is_free(port):
        pass
    _given.add(port)
    return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
