"""A lease ends what nobody renews."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines.hf_lease import Lease, renewal

pytestmark = pytest.mark.hub


def test_renewed_lease_holds() -> None:
    lease = Lease(10, started_at=0)
    assert all(lease.observe(now, renewal()) for now in range(0, 100, 9))


def test_unchanged_content_is_no_renewal() -> None:
    lease = Lease(10, started_at=0)
    assert lease.observe(1, b"same")
    assert lease.observe(11, b"same")
    assert not lease.observe(12, b"same")


def test_file_that_cannot_be_read_is_no_renewal_and_no_end() -> None:
    lease = Lease(10, started_at=0)
    assert lease.observe(1, b"one")
    assert lease.observe(10, None)
    assert lease.observe(11, b"one")
    assert not lease.observe(12, None)


@given(st.lists(st.tuples(st.floats(0, 5), st.one_of(st.none(), st.binary(max_size=1)))))
def test_ends_exactly_when_no_change_came_for_its_length(looks: list[tuple[float, bytes | None]]) -> None:
    lease, now, changed, last = Lease(10, started_at=0), 0.0, 0.0, None
    for step, content in looks:
        now += step
        if content is not None and content != last:
            changed, last = now, content
        assert lease.observe(now, content) == (now - changed <= 10)
