"""Where replicas are, as the launching side says and the trainer's Job reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines.hf_addresses import Address, from_json, moved, to_json
from rlkit.engines.hf_jobs import direct_url

pytestmark = pytest.mark.hub

ADDRESSES = st.builds(Address, st.text(), st.none() | st.text())


@given(st.dictionaries(st.integers(0, 99), ADDRESSES))
def test_what_is_written_is_read(addresses: dict[int, Address]) -> None:
    assert from_json(to_json(addresses)) == addresses


@given(st.binary() | st.none())
def test_file_that_is_not_whole_says_nothing_or_addresses(data: bytes | None) -> None:
    assert isinstance(from_json(data), dict)


def test_half_a_file_is_none() -> None:
    data = to_json({0: Address("http://a"), 1: Address("http://b", "http://c")})
    assert all(from_json(data[:length]) == {} for length in range(len(data)))


def test_only_known_replicas_that_are_elsewhere_have_moved() -> None:
    known = {0: Address("http://a"), 1: Address("http://b")}
    found = {0: Address("http://a"), 1: Address("http://c"), 7: Address("http://d")}
    assert moved(known, found) == {1: Address("http://c")}
    assert moved(known, {}) == {}


def test_direct_address_is_complete_inside_a_job_only() -> None:
    address = Address(direct_url(1, 8000), direct_url(1, 8001))
    assert address.is_direct
    inside = address.expanded({"HF_NETWORK_GROUP_PREFIX": "grp-"})
    assert inside == Address("http://grp-replica-1:8000", "http://grp-replica-1:8001")
    with pytest.raises(KeyError, match="HF_NETWORK_GROUP_PREFIX"):
        address.expanded({})
    exposed = Address("https://a--8000.hf.jobs")
    assert (exposed.is_direct, exposed.expanded({})) == (False, exposed)
