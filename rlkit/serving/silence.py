"""How a machine that vanished is noticed while nothing is said, which takes as long as a generation."""

from __future__ import annotations

import asyncio
import socket

# First probe after a minute of silence, given up after another.
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def probe_when_silent(transport: asyncio.BaseTransport) -> None:
    """Let the kernel probe the other end of a connection and close it when nobody answers."""
    connection: socket.socket = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in PROBES.items():
        if hasattr(socket, option):  # they are called otherwise on a Mac
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
