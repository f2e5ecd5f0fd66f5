"""Where a server listens, in words: its URL, and why it cannot."""

from __future__ import annotations

from rlkit.errors import BadInput


def base_url(host: str, port: int) -> str:
    """The URL of a server; an IPv6 address stands in brackets there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cannot_listen(host: str, port: int, problem: OSError | UnicodeError) -> BadInput:
    """The error for a host and port that cannot be had; UnicodeError: the host is no name that could be looked up."""
    reason = problem.strerror if isinstance(problem, OSError) else "not a host's name"
    return BadInput(f"port: cannot listen on {host}:{port}: {reason}")
