"""Ports for servers that are started with a number, some seconds after it was chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# The system takes ports from here on for connections, and for whoever asks for any port: one that
# was found free in that range is taken by somebody else before a slow server listens on it.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL = "32768 60999"
_FIRST = 10_100
_ATTEMPTS = 200


def free_port(twin: int = 0) -> int:
    """A port that nobody has on any address of this machine, and that is given to nobody unasked.

    Drawn by chance, so that processes side by side hardly ever draw the same one. The port that is
    higher by `twin` is free as well.

    Raises:
        RuntimeError: none of the many that were tried is free.
    """
    said = _EPHEMERAL.read_text() if _EPHEMERAL.exists() else _USUAL
    given_out_from = int(said.split()[0])
    # Where a machine gives out nearly all of them, the low ones go last.
    last = max(given_out_from, 2 * _FIRST) - 1
    # Not the shared generator, which whoever seeds it in each process makes the same in all.
    drawn = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = drawn.randint(_FIRST, last - twin)
        if all(map(_is_free, {port, port + twin})):
            return port
    raise RuntimeError(f"no free port between {_FIRST} and {last} in {_ATTEMPTS} attempts")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True
