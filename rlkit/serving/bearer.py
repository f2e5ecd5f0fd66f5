"""Bearer tokens that are compared in constant time and shown nowhere."""

from __future__ import annotations

import hmac
import os

from rlkit.errors import BadInput


class Bearer:
    """The token a server asks for, or a client sends."""

    def __init__(self, token: str) -> None:
        self._token = token

    @property
    def token(self) -> str:
        """The token itself."""
        return self._token

    @property
    def header(self) -> str:
        """The value of the Authorization header."""
        return f"Bearer {self._token}"

    def accepts(self, header: str | None) -> bool:
        """Whether a request with this Authorization header may pass; takes the same time for every wrong one."""
        scheme, _, token = (header or "").partition(" ")
        is_token = hmac.compare_digest(token.encode(errors="replace"), self._token.encode())
        return is_token and scheme.lower() == "bearer"  # RFC 9110 section 11.1: the scheme in any case

    def __repr__(self) -> str:
        return "Bearer(...)"


def bearer_from(variable: str | None, field: str) -> Bearer | None:
    """The token in an environment variable; None when no variable is named.

    Raises BadInput (naming `field`) when it is not set, or cannot stand in a header; the token is not shown.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise BadInput(f"{field}: the environment variable {variable} is not set")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise BadInput(
            f"{field}: the environment variable {variable} does not hold a token (printable ASCII, no space)"
        )
    return Bearer(token)
