from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import recipe, recorded

from rlkit.ledger import ledger_frame, waste_ledger
from rlkit.recipe import Recipe


def of(frame: pd.DataFrame, its_recipe: Recipe) -> dict[tuple[str, str], float]:
    return {(entry.side, entry.use): entry.seconds for entry in waste_ledger(frame, its_recipe)}


def steps(count: int = 10, **metrics: float) -> pd.DataFrame:
    named = {name.replace("__", "/"): [value] * count for name, value in metrics.items()}
    return pd.DataFrame(named, index=pd.RangeIndex(1, count + 1, name="global_step"), dtype="float64")


def test_every_second_of_a_real_run_is_in_it_once() -> None:
    frame = recorded("trainer-bound-run")
    table = ledger_frame(waste_ledger(frame, recipe()))

    assert table.groupby("side")["share"].sum().to_list() == pytest.approx([1.0, 1.0])
    wall = frame["perf/step_s"].sum()
    first = frame.loc[1, ["perf/fwd_bwd_s", "perf/rollout_wait_s", "perf/optimizer_s", "perf/weight_sync_s"]].sum()
    assert table[table["side"] == "trainer"]["seconds"].sum() == pytest.approx(wall + first)
    assert table["usd"].isna().all()


def test_seconds_and_dollars_of_a_run_that_can_be_added_up_by_hand() -> None:
    """Ten steps of 4 s: 2 s computing, half a second of it the forward again, 1 s waiting, 0.5 s of sync."""
    changed = recipe().with_overrides(["train.gradient_checkpointing=true", "hardware.usd_per_hour=7.2"])
    frame = steps(
        perf__step_s=4, perf__fwd_bwd_s=2, perf__fwd_s=0.5, perf__rollout_wait_s=1, perf__weight_sync_s=0.5,
        batch__samples_per_step=30, sample__dropped_stale_total=10,
        rollout__vllm_running_requests=48, rollout__vllm_queued_requests=0,
    )  # fmt: skip
    entries = {(entry.side, entry.use): entry for entry in waste_ledger(frame, changed)}

    seconds = {name: entry.seconds for name, entry in entries.items()}
    assert seconds == pytest.approx(
        {
            ("trainer", "trained"): 15, ("trainer", "forward again"): 5, ("trainer", "waiting"): 10,
            ("trainer", "syncing"): 5, ("trainer", "other"): 5,
            ("replicas", "syncing"): 5, ("replicas", "idle"): 35 / 4,
            ("replicas", "generated and dropped"): 35 * 3 / 4 / 4, ("replicas", "trained"): 35 * 3 / 4 * 3 / 4,
        }
    )  # fmt: skip
    assert sum(entry.usd or 0.0 for entry in entries.values()) == pytest.approx(40 * 7.2 / 3600)


def test_a_resumed_step_is_paid_for_once_and_a_log_without_times_has_no_ledger() -> None:
    frame = steps(perf__step_s=4, perf__fwd_bwd_s=2)
    twice = pd.concat([frame, frame.loc[8:]])

    assert of(twice, recipe()) == of(frame, recipe())
    assert waste_ledger(steps(reward=1.0), recipe()) == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=6, max_size=6), st.booleans())
def test_it_always_adds_up(values: list[float], checkpointing: bool) -> None:
    names = ("perf__step_s", "perf__fwd_bwd_s", "perf__fwd_s", "perf__rollout_wait_s", "perf__weight_sync_s",
             "sample__dropped_stale_total")  # fmt: skip
    frame = steps(5, batch__samples_per_step=8, **dict(zip(names, values, strict=True)))
    frame.loc[1, "perf/step_s"] = np.nan
    entries = waste_ledger(
        frame, recipe().with_overrides([f"train.gradient_checkpointing={str(checkpointing).lower()}"])
    )

    for side in {entry.side for entry in entries}:
        assert sum(entry.share for entry in entries if entry.side == side) == pytest.approx(1)
    assert all(entry.seconds > 0 for entry in entries)
