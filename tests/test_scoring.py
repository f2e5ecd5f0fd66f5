from __future__ import annotations

from dataclasses import replace

import pytest

from rlkit.judgement import judge
from rlkit.scoring import outlasts_a_step
from rlkit.signals import Signals

SHARES = {"forward_backward": 0.2, "rollout_wait": 0.15, "weight_sync": 0.6, "optimizer": 0.05, "other": 0.0}

# A sync of 8 s every fourth step of 3.3 s; a group is scored in 0.7 s, nearly all the time.
SLOW_REWARD = Signals(
    steps=35, shares=SHARES, step_s=3.3, wait_share=0.15, sync_share=0.6, weight_sync_s=8.0, queue_size=20.0,
    queue_maxsize=128.0, queue_full_reading=112.0, queue_fill=0.2, blocked_steps=0.0, score_s=0.7, score_busy=0.95,
    score_wait_s=9.0,
)  # fmt: skip


@pytest.mark.parametrize("dropped", [None, 0.4])
def test_a_line_that_a_sync_does_not_work_off_is_the_reward_s(dropped: float | None) -> None:
    judgement = judge(replace(SLOW_REWARD, dropped_per_trained=dropped))

    assert judgement.bound == "scoring"
    assert judgement.confidence == "low"


@pytest.mark.parametrize("changed", [{"score_wait_s": 2.0}, {"score_busy": 0.7}, {"score_wait_s": None}])
def test_one_that_a_sync_works_off_is_the_sync_s(changed: dict[str, float | None]) -> None:
    signals = replace(SLOW_REWARD, **changed)  # type: ignore[arg-type]

    assert not outlasts_a_step(signals)
    judgement = judge(signals)
    assert judgement.bound == "sync"


def test_a_reward_that_is_rarely_computed_leaves_a_sync_as_sure_as_it_is() -> None:
    judgement = judge(replace(SLOW_REWARD, score_busy=0.2))

    assert judgement.bound == "sync"
    assert judgement.confidence == "medium"
