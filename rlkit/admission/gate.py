"""Who may start: first come, first served, never more at once than the cap. A pure state machine, no tasks.

Events go in and the tickets admitted by them come out, in the order they arrived. A cap below what is in flight admits
nobody until enough have left; nothing that was admitted is ever taken back. The cap is never below 1, or the gate could
stand still for ever. An open gate holds nobody, whatever the cap.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Ticket = TypeVar("Ticket", bound=Hashable)


class Gate(Generic[Ticket]):
    """A gate with at most `cap` tickets inside (at least 1)."""

    def __init__(self, cap: int) -> None:
        self._cap = max(1, cap)
        self._open = False
        self._held: dict[Ticket, None] = {}  # in the order of arrival
        self._inside: set[Ticket] = set()
        self._left = 0

    @property
    def cap(self) -> int:
        """How many may be inside; it stays what it was when the gate opens."""
        return self._cap

    @property
    def is_open(self) -> bool:
        """Whether everybody passes."""
        return self._open

    @property
    def in_flight(self) -> int:
        """Admitted and not yet left."""
        return len(self._inside)

    @property
    def held(self) -> int:
        """Arrived and not yet admitted."""
        return len(self._held)

    @property
    def completed(self) -> int:
        """Left after they had been admitted, since the beginning."""
        return self._left

    def arrive(self, ticket: Ticket) -> list[Ticket]:
        """Line up; ValueError if the ticket is here already."""
        if ticket in self._held or ticket in self._inside:
            raise ValueError(f"ticket {ticket!r} is at the gate already")
        self._held[ticket] = None
        return self._admit()

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Go, from inside or from the line; ValueError if the ticket is not here (it left before)."""
        if ticket in self._inside:
            self._inside.remove(ticket)
            self._left += 1
        elif ticket in self._held:
            del self._held[ticket]
        else:
            raise ValueError(f"ticket {ticket!r} is not at the gate")
        return self._admit()

    def set_cap(self, cap: int) -> list[Ticket]:
        """Change the cap; below 1 counts as 1."""
        self._cap = max(1, cap)
        return self._admit()

    def open(self) -> list[Ticket]:
        """Admit everybody from now on, for good."""
        self._open = True
        return self._admit()

    def _admit(self) -> list[Ticket]:
        room = len(self._held) if self._open else max(0, self._cap - len(self._inside))
        admitted = list(self._held)[:room] if room else []
        for ticket in admitted:
            del self._held[ticket]
            self._inside.add(ticket)
        return admitted
