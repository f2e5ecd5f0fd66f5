"""Where a run's replicas are. Pure.

The trainer's Job is told when it starts. A replica that is replaced later may be elsewhere: the launching side writes
the new addresses into the bucket, and the trainer's Job, which looks at that file, tells its proxy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

FILE = "replicas.json"  # in the run's folder


@dataclass(frozen=True)
class Address:
    """A replica's base URL, and that of the receiver beside it when adapters are pushed."""

    url: str
    receiver: str | None = None

    @property
    def is_direct(self) -> bool:
        """Whether it is reached within a network group, so that nothing on the way asks for a token."""
        return "$" in self.url

    def expanded(self, environment: Mapping[str, str] = os.environ) -> Address:
        """With the values of `environment` for `${NAME}`. Raises KeyError for one that is not set."""
        receiver = None if self.receiver is None else _expanded(self.receiver, environment)
        return Address(_expanded(self.url, environment), receiver)


def to_json(addresses: Mapping[int, Address]) -> bytes:
    """The addresses by the replicas' numbers."""
    return json.dumps({str(number): [one.url, one.receiver] for number, one in sorted(addresses.items())}).encode()


def from_json(data: bytes | None) -> dict[int, Address]:
    """What `to_json` wrote; empty for a file that is not there, or not whole yet."""
    try:
        found = json.loads(data or b"{}")
        return {int(number): Address(url, receiver) for number, (url, receiver) in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def moved(known: Mapping[int, Address], found: Mapping[int, Address]) -> dict[int, Address]:
    """Of the known replicas, those that are somewhere else now."""
    return {number: one for number, one in found.items() if number in known and known[number] != one}


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    before, opening, rest = text.partition("${")
    if not opening:
        return text
    name, _, after = rest.partition("}")
    return before + environment[name] + after
