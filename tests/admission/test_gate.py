from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlkit.admission.gate import Gate


def test_first_come_first_served() -> None:
    gate = Gate[str](2)
    assert [gate.arrive(name) for name in "abcd"] == [["a"], ["b"], [], []]
    assert (gate.in_flight, gate.held) == (2, 2)
    assert gate.leave("b") == ["c"]
    assert gate.set_cap(3) == ["d"]


def test_a_lower_cap_takes_nobody_back_and_admits_nobody_until_enough_have_left() -> None:
    gate = Gate[int](4)
    for number in range(6):
        gate.arrive(number)
    assert gate.set_cap(2) == []
    assert gate.in_flight == 4
    assert [gate.leave(number) for number in (0, 1, 2)] == [[], [], [4]]


@pytest.mark.parametrize("cap", [0, -3])
def test_the_cap_is_never_below_one(cap: int) -> None:
    assert Gate[str](cap).arrive("a") == ["a"]
    gate = Gate[str](1)
    gate.set_cap(cap)
    assert gate.cap == 1
    assert gate.arrive("a") == ["a"]


def test_an_open_gate_holds_nobody_and_stays_open() -> None:
    gate = Gate[int](1)
    for number in range(3):
        gate.arrive(number)
    assert gate.open() == [1, 2]
    assert gate.set_cap(1) == []
    assert gate.arrive(3) == [3]
    assert gate.open() == []
    assert (gate.in_flight, gate.held, gate.cap, gate.is_open) == (4, 0, 1, True)


def test_leaves_exactly_once_from_inside_or_from_the_line() -> None:
    gate = Gate[str](1)
    gate.arrive("a")
    gate.arrive("b")
    assert gate.leave("b") == []
    assert gate.completed == 0
    with pytest.raises(ValueError, match="'b' is not at the gate"):
        gate.leave("b")
    assert gate.leave("a") == []
    assert gate.completed == 1
    with pytest.raises(ValueError, match="'a' is not at the gate"):
        gate.leave("a")


def test_a_ticket_arrives_once() -> None:
    gate = Gate[str](1)
    gate.arrive("a")
    gate.arrive("b")
    for ticket in ("a", "b"):
        with pytest.raises(ValueError, match="already"):
            gate.arrive(ticket)


class GateMachine(RuleBasedStateMachine):
    """The gate against the plain statement of what it does: a line, and those inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate[int](3)
        self.cap, self.opened, self.tickets, self.left = 3, False, 0, 0
        self.line: list[int] = []
        self.inside: list[int] = []

    def expect(self, admitted: list[int]) -> None:
        count = len(self.line) if self.opened else max(0, min(len(self.line), self.cap - len(self.inside)))
        assert admitted == self.line[:count]
        self.inside += self.line[:count]
        self.line = self.line[count:]

    @rule()
    def arrive(self) -> None:
        self.tickets += 1
        self.line.append(self.tickets)
        self.expect(self.gate.arrive(self.tickets))

    @precondition(lambda self: self.inside or self.line)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.inside + self.line))
        self.left += ticket in self.inside
        (self.inside if ticket in self.inside else self.line).remove(ticket)
        self.expect(self.gate.leave(ticket))
        with pytest.raises(ValueError, match="not at the gate"):
            self.gate.leave(ticket)

    @rule(cap=st.integers(-2, 8))
    def set_cap(self, cap: int) -> None:
        self.cap = max(1, cap)
        self.expect(self.gate.set_cap(cap))

    # Rarely, or most runs would be of an open gate.
    @precondition(lambda self: self.tickets > 20)
    @rule()
    def open(self) -> None:
        self.opened = True
        self.expect(self.gate.open())

    @invariant()
    def counts(self) -> None:
        assert (self.gate.in_flight, self.gate.held, self.gate.cap) == (len(self.inside), len(self.line), self.cap)
        assert self.gate.completed == self.left

    @invariant()
    def stands_still_only_when_full(self) -> None:
        assert not self.line or self.gate.in_flight >= self.cap


TestGateMachine = GateMachine.TestCase
