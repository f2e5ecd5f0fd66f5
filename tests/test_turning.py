"""What is said to turn a verdict turns it."""

from __future__ import annotations

import pytest

from rlkit.judgement import judge
from rlkit.leverage import FETCHING, HALF_AHEAD_STEPS
from rlkit.signals import Signals
from rlkit.turning import FEW_STEPS, SHORT_WAIT, would_change

ROOM = 10.0  # steps' samples that the queue holds


def signals(wait: float, steps: float, blocked: float = 0.0, sync: float = 0.1) -> Signals:
    """A run of 16 samples a step, which waits for the first FETCHING of the step in every one."""
    parts = {"forward_backward": 1.0 - wait - sync, "rollout_wait": wait, "weight_sync": sync, "optimizer": 0.0}
    return Signals(
        steps=60, step_s=2.0, shares=parts | {"other": 0.0}, wait_share=wait, least_wait_share=min(wait, FETCHING),
        sync_share=sync, weight_sync_s=sync, queue_size=16 * steps, queue_maxsize=16 * ROOM,
        queue_full_reading=16 * (ROOM - 0.5), queue_fill=steps / (ROOM - 0.5), samples_per_step=16.0,
        blocked_steps=blocked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "before", "after", "turned"),
    [
        ("trainer", signals(0.0, 5.0), signals(0.0, FEW_STEPS - 0.02, sync=0.0), "balanced"),
        ("trainer", signals(0.0, 0.5, blocked=1.0), signals(0.0, 0.5), "balanced"),
        ("generation", signals(0.1, 0.5), signals(SHORT_WAIT - 0.001, 0.5), "balanced"),
        ("balanced", signals(0.0, 0.5), signals(SHORT_WAIT + FETCHING + 0.001, 0.5), "generation"),
        ("balanced", signals(0.0, 0.5), signals(0.0, HALF_AHEAD_STEPS, sync=0.2), "trainer"),
    ],
)
def test_what_is_said_to_turn_a_verdict_turns_it(bound: str, before: Signals, after: Signals, turned: str) -> None:
    assert (judge(before).bound, judge(after).bound) == (bound, turned)


def test_the_thresholds_are_said() -> None:
    trainer, generation, balanced = signals(0.0, 5.0), signals(0.1, 0.5), signals(0.0, 0.5)
    assert "less than 1.3 steps' samples" in would_change(judge(trainer), trainer)
    assert "waited for less than 2 % of the step" in would_change(judge(generation), generation)
    said = would_change(judge(balanced), balanced)
    assert "a wait of over 4 % of the step" in said
    assert "more than 1.8 steps' samples" in said
