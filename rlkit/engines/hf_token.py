"""The token that a receiver asks the proxy for, inside a Job's environment."""

from __future__ import annotations

import hashlib
import os

from rlkit.engines.hf_jobs import TOKEN_VARIABLE

RECEIVER_VARIABLE = "RLKIT_RECEIVER_TOKEN"


def receiver_token_variable(is_direct: bool) -> str:
    """The environment variable that holds it.

    The Jobs proxy before an exposed port wants the Hub's token and passes it on. Within a network group the way is
    plain HTTP, so another one is made of it there, which both ends know and which opens nothing else.
    """
    if not is_direct:
        return TOKEN_VARIABLE
    os.environ[RECEIVER_VARIABLE] = hashlib.sha256(b"receiver " + os.environ[TOKEN_VARIABLE].encode()).hexdigest()
    return RECEIVER_VARIABLE
