from __future__ import annotations

import random

import pytest

from rlkit.errors import RunFailed
from rlkit.simulation.setup import SyncSetup
from rlkit.simulation.sync import Publisher


def publisher(servers: int = 2, **setup: object) -> Publisher:
    base: dict[str, object] = {"lag_deviation_s": 0.0, "load_s": 0.8, "lag_s": 3.0}
    return Publisher(SyncSetup(**(base | setup)), servers, 4, random.Random(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("retry_s", "attempts"), [(2.0, 3), (0.5, 4)])
def test_a_replica_is_asked_until_its_mount_shows_the_files(retry_s: float, attempts: int) -> None:
    sync = publisher(retry_s=retry_s).publish(1)
    # Attempts begin every load + retry seconds: the first at 3.0 s or later succeeds.
    assert sync.attempts == (attempts, attempts)
    assert sync.accept_s == pytest.approx((attempts - 1) * (0.8 + retry_s) + 0.8)
    assert sync.seconds == pytest.approx(0.3 + 1.1 + sync.accept_s)


def test_many_versions_in_turn_never_run_out_of_slots() -> None:
    publishes = publisher(max_loras=6)
    assert all(publishes.publish(version).attempts == (4, 4) for version in range(1, 30))


def test_the_slowest_replica_decides() -> None:
    lucky = publisher(lag_deviation_s=0.4, retry_s=0.5).publish
    syncs = [lucky(version) for version in range(1, 60)]
    assert any(len(set(sync.attempts)) > 1 for sync in syncs)
    for sync in syncs:
        assert sync.accept_s == pytest.approx((max(sync.attempts) - 1) * 1.3 + 0.8)


def test_pushed_adapters_and_full_weights_have_no_lag() -> None:
    assert publisher(kind="push", push_s=0.05).publish(1).accept_s == pytest.approx(0.05)
    merged = publisher(kind="merged", merged_s=1.25).publish(1)
    assert (merged.seconds, merged.attempts) == (1.25, ())


def test_a_mount_that_lags_beyond_the_deadline_fails_the_run() -> None:
    with pytest.raises(RunFailed, match=r"the sync of version 1 failed: replica 0, 1 did not accept it within 2 s"):
        publisher(deadline_s=2.0).publish(1)
