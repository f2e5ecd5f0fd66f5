from __future__ import annotations

from dataclasses import replace

import pytest

from rlkit.leverage import LEAST_LEVERAGE, flushed, leverage
from rlkit.signals import Signals


def signals(wait: float, sync: float, fill: float | None, blocked: float = 0.0, dropped: float = 0.0) -> Signals:
    """Of a run that computes whenever it neither waits nor syncs."""
    shares = {"forward_backward": 1 - wait - sync, "rollout_wait": wait, "weight_sync": sync, "optimizer": 0.0,
              "other": 0.0}  # fmt: skip
    return Signals(steps=30, shares=shares, step_s=10.0, wait_share=wait, sync_share=sync, queue_fill=fill,
                   blocked_steps=blocked, dropped_per_trained=dropped)  # fmt: skip


def test_without_the_parts_of_a_step_nothing_is_said() -> None:
    assert leverage(Signals(wait_share=0.3)) is None
    assert leverage(replace(signals(0.1, 0.1, 0.5), wait_share=None)) is None


@pytest.mark.parametrize(
    ("wait", "sync", "fill", "first"),
    [
        (0.0, 0.1, 1.0, "trainer"),
        (0.6, 0.1, 0.05, "generation"),
        (0.0, 0.6, 1.0, "sync"),
        (0.2, 0.6, 0.05, "sync"),
        # As simulated: what generation can save is what the trainer waits, whatever the queue says.
        (0.088, 0.12, 0.64, "generation"),
        (0.033, 0.5, 0.33, "sync"),
        (0.002, 0.17, 0.63, "trainer"),
    ],
)
def test_the_side_that_the_step_hangs_on(wait: float, sync: float, fill: float, first: str) -> None:
    found = leverage(signals(wait, sync, fill))

    assert found is not None
    assert max(found, key=lambda side: found[side]) == first
    assert all(0 <= value <= 1 for value in found.values())


def test_sides_of_one_speed_have_no_leverage() -> None:
    found = leverage(signals(0.018, 0.1, 0.12))

    assert found is not None
    assert max(found.values()) < LEAST_LEVERAGE


def test_what_every_step_waits_is_fetching() -> None:
    waiting = signals(0.012, 0.1, 1.0)
    fetching = leverage(replace(waiting, least_wait_share=0.012))
    starving = leverage(replace(waiting, least_wait_share=0.0))

    assert fetching is not None
    assert starving is not None
    assert fetching["generation"] == 0.0
    assert starving["generation"] > 0.1
    assert starving["trainer"] == fetching["trainer"] == pytest.approx(0.888)


def test_a_queue_of_samples_that_are_too_old_is_the_trainer_s() -> None:
    stale = signals(0.07, 0.15, 1.0, blocked=1.0, dropped=0.5)

    assert flushed(stale)
    found = leverage(stale)
    assert found is not None
    assert max(found, key=lambda side: found[side]) == "trainer"
    assert flushed(replace(stale, queue_fill=None))
    assert not flushed(replace(stale, dropped_per_trained=0.0))
    assert not flushed(replace(stale, blocked_steps=0.1))


def test_the_oldest_samples_of_a_full_queue_are_gone_before_it_is_read() -> None:
    read = replace(signals(0.0, 0.15, 0.4, blocked=1.0, dropped=3.0), samples_per_step=16.0, queue_full_reading=120.0)

    assert flushed(read)
    assert not flushed(replace(read, dropped_per_trained=0.2))
    assert not flushed(replace(read, blocked_steps=0.1))


def test_replicas_go_on_for_half_of_a_pause_where_the_trainer_waits_for_them() -> None:
    starving, busy = signals(0.3, 0.5, 0.1), signals(0.0, 0.5, 1.0)
    whole, paused = leverage(starving), leverage(replace(starving, pause_share=0.1))

    assert whole is not None
    assert paused is not None
    assert paused["sync"] == pytest.approx(whole["sync"] - 0.05)
    assert paused["generation"] == pytest.approx(whole["generation"] + 0.05)
    assert leverage(replace(busy, pause_share=0.1)) == leverage(busy)


@pytest.mark.parametrize(("usage", "more"), [(1.0, 1.7), (0.95, 1.35), (0.9, 1.0), (None, 1.0)])
def test_faster_replicas_gain_twice_where_their_cache_is_full_all_the_time(usage: float | None, more: float) -> None:
    starving = signals(0.6, 0.3, 0.05)
    crowded = leverage(replace(starving, kv_cache_usage=usage, preemptions_per_sample=5.0))
    roomy = leverage(replace(starving, kv_cache_usage=usage))

    assert crowded is not None
    assert roomy is not None
    assert crowded["generation"] == pytest.approx(0.7 * more)
    assert roomy["generation"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("steps", "blocked", "held_s", "ahead"),
    [
        (0.9, 0.0, 0.0, 1 / 17),
        (1.8, 0.0, 0.0, 0.5),
        (1.8, 0.9, 5.0, 0.5),
        (3.6, 0.0, 0.0, 16 / 17),
        (0.1, 1.0, 1.0, 1.0),
        (0.1, 0.95, 1.0, 0.5),
        (0.1, 0.875, 8.0, 0.5),
        (0.1, 0.8, 10.0, 1.0),
    ],
)
def test_generation_is_ahead_by_what_lies_in_the_queue_or_is_held_back(
    steps: float, blocked: float, held_s: float, ahead: float
) -> None:
    short = replace(signals(0.0, 0.1, 0.5, blocked), backpressure_s=held_s)
    ready = replace(short, queue_size=16.0 * steps, samples_per_step=16.0)
    found = leverage(ready)

    assert found is not None
    assert found["trainer"] == pytest.approx(0.9 * ahead, abs=0.002)


@pytest.mark.parametrize(("dropped", "ahead"), [(0.1, 0.0), (0.3, 0.5), (2.0, 1.0)])
def test_what_is_thrown_away_while_more_is_held_back_is_ahead(dropped: float, ahead: float) -> None:
    spare = replace(signals(0.0, 0.1, 0.5, 0.6, dropped), queue_size=1.0, samples_per_step=16.0)
    found, unblocked = leverage(spare), leverage(replace(spare, blocked_steps=0.4))

    assert found is not None
    assert unblocked is not None
    assert found["trainer"] == pytest.approx(0.9 * ahead, abs=0.001)
    assert unblocked["trainer"] == pytest.approx(0.0, abs=0.001)


def test_without_the_count_of_blocked_steps_a_nearly_full_queue_is_ahead() -> None:
    short = replace(signals(0.0, 0.1, 0.9), queue_size=16.0, samples_per_step=16.0)
    unknown = leverage(replace(short, blocked_steps=None))

    assert unknown is not None
    assert unknown["trainer"] == pytest.approx(0.9)


def test_a_faster_generation_also_makes_more_that_is_thrown_away() -> None:
    whole, half = (leverage(signals(0.6, 0.2, 0.05, dropped=dropped)) for dropped in (0.0, 0.5))

    assert whole is not None
    assert half is not None
    assert half["generation"] == pytest.approx(0.9 * whole["generation"])
