from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recorded_runs import recorded

from rlkit.causes import shorten_sync
from rlkit.diagnosis import Verdict, diagnose
from rlkit.recipe import Recipe, load_recipe
from rlkit.signals import measure
from rlkit.tracking import load_run, write_run

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
CHASE: dict[str, dict[str, Any]] = {
    run["name"]: run for run in json.loads((DATA / "published-chase.json").read_text())["runs"]
}
STEP_METRICS = ("perf/", "batch/", "sample/", "rollout/")


@cache
def published_recipe(name: str) -> Recipe:
    return load_recipe(ROOT / "runs" / "published" / f"{name}.yaml")


def published_frame(name: str, steps: int | None = None) -> pd.DataFrame:
    """A log with the published figures and nothing else, one row per step.

    TRL's names only; a range alternates between its ends. The figures are medians, and with a sync every four steps the
    median step has none: a step that syncs takes perf/step_s plus perf/weight_sync_s. Step 1 has the cold sync and no
    perf/step_s.
    """
    run, every = CHASE[name], published_recipe(name).rollout.weight_sync_steps
    published = {
        k: v for k, v in run["published"].items() if k.startswith(STEP_METRICS) and not k.endswith(("_range", "_min"))
    }
    rows = []
    for step in range(1, (steps or run["steps_run"]) + 1):
        row = {k: v[step % 2] if isinstance(v, list) else v for k, v in published.items()}
        if step != 1 and step % every:
            row.pop("perf/weight_sync_s")
        if step == 1:
            row.pop("perf/step_s", None)
        elif step % every == 0 and "perf/step_s" in row:
            row["perf/step_s"] += row["perf/weight_sync_s"]
        rows.append(row)
    return pd.DataFrame(rows, index=pd.RangeIndex(1, len(rows) + 1, name="global_step"))


@cache
def local_recipe(*overrides: str) -> Recipe:
    as_recorded = ["serve.replicas=1", "rollout.queue_maxsize=256", "cap.policy=none", *overrides]
    return load_recipe(ROOT / "runs" / "local.yaml", as_recorded)


TRAINER_BOUND_OVERRIDES = ("train.token_budget=0", "train.gradient_accumulation_steps=64",
                           "train.gradient_checkpointing=true")  # fmt: skip


def flat_frame(steps: int = 60, /, **metrics: float | None) -> pd.DataFrame:
    """A log that says the same in every step; `perf__step_s` is perf/step_s, None leaves a metric out."""
    columns: dict[str, float | None] = {
        "perf/step_s": 2.0,
        "perf/fwd_bwd_s": 1.0,
        "perf/rollout_wait_s": 0.01,
        "perf/optimizer_s": 0.1,
        "perf/weight_sync_s": 0.2,
        "sample/rollout_queue_size": 200.0,
        "batch/samples_per_step": 64.0,
        "rollout/inflight": 64.0,
        "sample/staleness_mean": 1.0,
    }
    columns |= {name.replace("__", "/"): value for name, value in metrics.items()}
    frame = pd.DataFrame({k: [v] * steps for k, v in columns.items() if v is not None})
    return frame.set_axis(pd.RangeIndex(1, steps + 1), axis=0)


def reads(verdict: Verdict) -> Mapping[str, str]:
    return {item.metric: item.sentence for item in verdict.evidence}


@pytest.mark.parametrize(
    ("name", "bound", "confidence", "cause", "fields"),
    [
        (
            "r1-dp2",
            "trainer",
            "high",
            "tiny microbatches (1.0 samples per row)",
            ["train.token_budget=16384", "train.gradient_accumulation_steps"],
        ),
        (
            "r1-dp2-tb16k",
            "trainer",
            "high",
            "the forward pass is computed twice (forward+backward / forward = 4.2)",
            ["train.gradient_checkpointing=false"],
        ),
        (
            "r1-dp2-tb16k-nockpt",
            "generation",
            "medium",
            "the replicas' generation rate, and the weight sync, which pauses them, takes up to 27 % of the step",
            ["serve.replicas from 2 to 3", "transport.retry_s from 2 to 0.5", "weight_sync_steps from 4 to 8"],
        ),
        (
            "r1-dp3-tb16k-nockpt",
            "generation",
            "low",
            "the client's in-flight limit (rollout.max_inflight_tasks 128 for 3 replicas: 43 each)",
            ["rollout.max_inflight_tasks from 128 to 384", "rollout.queue_maxsize from 512 to 768"],
        ),
        (
            "r1-dp3-inflight384",
            "trainer",
            "high",
            "compute at 23.5 % MFU, and the weight sync takes 24 % of the step",
            ["train.processes"],
        ),
    ],
)
def test_published_runs_get_their_published_verdict_and_cause(
    name: str, bound: str, confidence: str, cause: str, fields: list[str]
) -> None:
    assert CHASE[name]["verdict"] == f"{bound}-bound"

    verdict = diagnose(published_frame(name), published_recipe(name))

    assert verdict.bound == bound
    assert verdict.confidence == confidence
    assert verdict.cause == cause
    assert all(field in verdict.next_action for field in fields)


@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("r1-dp2", ["tiny-rows", "compute"]),
        ("r1-dp2-tb16k", ["recompute", "compute", "sync"]),
        ("r1-dp2-tb16k-nockpt", ["replicas", "sync"]),
        ("r1-dp3-tb16k-nockpt", ["client-limit", "replicas", "sync"]),
        ("r1-dp3-inflight384", ["compute", "sync"]),
    ],
)
def test_published_runs_name_their_causes_in_order(name: str, causes: list[str]) -> None:
    verdict = diagnose(published_frame(name), published_recipe(name))

    assert [cause.name for cause in verdict.causes] == causes


@pytest.mark.parametrize("name", ["r1-dp2", "r1-dp3-inflight384"])
def test_published_steps_add_up_to_the_published_wall_clock(name: str) -> None:
    """The reading of medians that `published_frame` rests on."""
    step_s = diagnose(published_frame(name), published_recipe(name)).signals["step_s"]
    assert step_s is not None

    assert step_s * CHASE[name]["steps_run"] / 60 == pytest.approx(CHASE[name]["published"]["wall_clock_min"], rel=0.02)


def test_tokens_of_a_sample_say_how_many_rows_they_need() -> None:
    """128 samples of 1,200 tokens in rows of 16,384 that get 95 % full, on two ranks: 4.9 rows each."""
    frame = published_frame("r1-dp2").assign(**{"batch/row_tokens_mean": 1200.0})

    action = diagnose(frame, published_recipe("r1-dp2")).next_action

    assert action.endswith("train.token_budget=16384, and train.gradient_accumulation_steps=5.")


def test_the_first_published_run_in_words() -> None:
    verdict = diagnose(published_frame("r1-dp2"), published_recipe("r1-dp2"))

    assert (
        verdict.headline == "Trainer-bound: forward+backward takes 87 % of the step and the queue is full (476 of 512)."
    )
    assert verdict.steps == 495
    assert verdict.shares["weight_sync"] == pytest.approx(CHASE["r1-dp2"]["published"]["sync_share_of_wall"], abs=0.01)
    assert reads(verdict) == {
        "perf/step_s": "A step takes 25 s on average over 495 steps: forward+backward 87 %, waiting for rollouts under "
        "0.1 %, the weight sync 9 %, everything else 4 %.",
        "perf/rollout_wait_s": "The trainer waits 0.02 s a step, under 0.1 % of it.",
        "sample/rollout_queue_size": "The rollout queue holds 476 samples; when full it reads about 448 of its 512.",
        "rollout/backpressure_s": "In 100 % of the steps finished rollouts are held back by a full queue, 15 s each.",
        "perf/mfu_fwd_bwd": "The trainer reaches 3.9 % MFU in forward+backward.",
        "batch/samples_per_row": "A row of a microbatch holds 1.0 samples.",
        "perf/weight_sync_s": "A weight sync takes 8.5 s, every 4 steps: 2.13 s a step, 9 % of it.",
        "sample/staleness_mean": "A sample is 1.5 policy versions old when trained on, 4 at most (4 are allowed).",
    }


def test_what_the_fourth_published_run_left_out_is_not_made_up() -> None:
    verdict = diagnose(published_frame("r1-dp3-tb16k-nockpt"), published_recipe("r1-dp3-tb16k-nockpt"))

    assert verdict.shares == {}
    assert verdict.signals["wait_share"] is None
    assert verdict.reason == (
        "no finished rollout was ever held back, all 128 rollouts allowed in flight are, and 26,000 tok/s are 80 % of "
        "what the trainer could use; perf/rollout_wait_s is not logged"
    )
    assert verdict.headline == (
        "Generation-bound: all 128 rollouts allowed in flight are, and no finished one was ever held back."
    )


@pytest.mark.parametrize("spoil", ["rollout/inflight", "rollout/generated_tok_s", "perf/fwd_bwd_s"])
def test_the_fourth_published_run_needs_every_sign_it_has(spoil: str) -> None:
    frame = published_frame("r1-dp3-tb16k-nockpt").drop(columns=spoil)

    assert diagnose(frame, published_recipe("r1-dp3-tb16k-nockpt")).bound == "undetermined"


def test_a_real_trainer_bound_run() -> None:
    verdict = diagnose(recorded("trainer-bound-run"), local_recipe(*TRAINER_BOUND_OVERRIDES))

    assert (verdict.bound, verdict.confidence, verdict.steps) == ("trainer", "medium", 9)
    assert (
        verdict.headline
        == "Trainer-bound: forward+backward takes 87 % of the step and the queue is mostly full (198 of 256)."
    )
    assert verdict.cause == "tiny microbatches (1.0 samples per row)"
    assert "train.token_budget=512, and" in verdict.next_action
    assert verdict.shares["rollout_wait"] < 0.02
    assert sum(verdict.shares.values()) == pytest.approx(1, abs=1e-9)
    assert "100 % of the steps" in reads(verdict)["rollout/backpressure_s"]
    assert "thrown away as stale" in reads(verdict)["sample/dropped_stale_total"]
    assert "it computes for 87 % of the time" in reads(verdict)["perf/mfu_fwd_bwd"]


def test_a_real_run_that_waits_for_its_rollouts() -> None:
    verdict = diagnose(recorded("learning-run"), local_recipe())

    assert (verdict.bound, verdict.confidence, verdict.steps) == ("generation", "high", 45)
    assert verdict.headline == (
        "Generation-bound: the trainer waits 67 % of the step for rollouts and the queue is nearly empty (12.6 of 256)."
    )
    assert verdict.cause == "the client's in-flight limit (rollout.max_inflight_tasks 64)"
    assert verdict.shares["rollout_wait"] == pytest.approx(0.67, abs=0.01)
    assert reads(verdict)["rollout/backpressure_s"] == "No finished rollout was ever held back by a full queue."


def test_a_run_read_back_from_trackio_gets_the_same_verdict() -> None:
    recipe, frame = local_recipe(), recorded("learning-run")
    logged = frame.drop(columns="timestamp").reset_index().to_dict("records")
    rows = [{str(name): float(value) for name, value in row.items() if pd.notna(value)} for row in logged]
    write_run("local", "run", rows, list(frame["timestamp"]), {"recipe": recipe.to_dict()})

    run = load_run("local")

    assert diagnose(run.frame, run.recipe) == diagnose(frame, recipe)


def test_a_real_run_without_its_recipe() -> None:
    waiting, busy = diagnose(recorded("learning-run")), diagnose(recorded("trainer-bound-run"))

    assert (waiting.bound, waiting.cause) == ("generation", "the replicas' generation rate")
    assert (busy.bound, busy.confidence) == ("trainer", "medium")


def test_shares_count_a_sync_once_per_interval() -> None:
    """Four steps of 1 s and a sync of 2 s on the last: a third of six seconds, not two thirds of the one step."""
    frame = flat_frame(45, perf__step_s=1.0, perf__fwd_bwd_s=0.9, perf__optimizer_s=None)
    sync = frame.index % 4 == 0
    frame["perf/weight_sync_s"] = np.where(sync, 2.0, np.nan)
    frame.loc[sync, "perf/step_s"] = 3.0

    verdict = diagnose(frame, local_recipe("rollout.weight_sync_steps=4"))

    assert verdict.shares["weight_sync"] == pytest.approx(1 / 3)
    assert verdict.shares["forward_backward"] == pytest.approx(0.9 / 1.5)
    assert verdict.shares["optimizer"] == 0


def test_shares_of_a_log_with_a_row_every_ten_steps() -> None:
    """A row is then a mean over its window: how often it synced is in the recipe, not in the log."""
    frame = flat_frame(12, perf__step_s=2.0, perf__fwd_bwd_s=1.0, perf__weight_sync_s=4.0)
    frame.index = frame.index * 10

    verdict = diagnose(frame, local_recipe("rollout.weight_sync_steps=5"))

    assert verdict.steps == 11
    assert verdict.shares["weight_sync"] == pytest.approx(0.4)


def test_the_warm_up_is_set_aside() -> None:
    frame = flat_frame()
    frame.loc[1:5, "perf/rollout_wait_s"] = 100.0
    frame.loc[1:5, "perf/step_s"] = 102.0

    verdict = diagnose(frame, local_recipe())

    assert (verdict.bound, verdict.steps) == ("trainer", 55)
    assert verdict.signals["rollout_wait_s"] == pytest.approx(0.01)


def test_the_warm_up_of_a_resume_is_set_aside() -> None:
    frame = flat_frame()
    frame.loc[1, "perf/step_s"] = np.nan
    frame.loc[31, "perf/step_s"] = np.nan  # a step without a step time is a trainer's first
    frame.loc[31:35, "perf/rollout_wait_s"] = 100.0

    verdict = diagnose(frame, local_recipe())

    assert (verdict.bound, verdict.steps) == ("trainer", 50)
    assert verdict.signals["rollout_wait_s"] == pytest.approx(0.01)


def nothing_logged() -> pd.DataFrame:
    return pd.DataFrame()


def foreign_metrics() -> pd.DataFrame:
    return pd.DataFrame({"loss": [1.0] * 50, "reward": [0.5] * 50})


def only_nan() -> pd.DataFrame:
    frame = flat_frame()
    frame[:] = np.nan
    return frame


def warmup_only() -> pd.DataFrame:
    return flat_frame(5)


def hardly_more() -> pd.DataFrame:
    return flat_frame(7)


def full_and_waiting() -> pd.DataFrame:
    return flat_frame(perf__rollout_wait_s=0.8, perf__fwd_bwd_s=0.5, sample__rollout_queue_size=220.0)


def brimful_and_waiting_a_little() -> pd.DataFrame:
    return flat_frame(perf__rollout_wait_s=0.2, sample__rollout_queue_size=222.0)


def changed_midway() -> pd.DataFrame:
    frame = flat_frame(105, sample__rollout_queue_size=224.0)
    frame.loc[56:, "sample/rollout_queue_size"] = 60.0
    frame.loc[56:, "perf/rollout_wait_s"] = 0.95
    frame.loc[40:55, "sample/rollout_queue_size"] = 230.0
    frame.loc[56:80, "sample/rollout_queue_size"] = 170.0
    return frame


def no_queue() -> pd.DataFrame:
    return flat_frame(sample__rollout_queue_size=None, rollout__inflight=None)


def waiting_without_queue() -> pd.DataFrame:
    return flat_frame(perf__rollout_wait_s=0.3, sample__rollout_queue_size=None)


def empty_queue_without_wait() -> pd.DataFrame:
    return flat_frame(perf__rollout_wait_s=None, sample__rollout_queue_size=5.0)


def neither() -> pd.DataFrame:
    return flat_frame(perf__rollout_wait_s=None, sample__rollout_queue_size=None)


def other_recipe() -> pd.DataFrame:
    return flat_frame(sample__rollout_queue_size=400.0)


def step_beyond_the_queue() -> pd.DataFrame:
    return flat_frame(batch__samples_per_step=600.0, rollout__inflight=None)


def held_back_and_waiting() -> pd.DataFrame:
    return flat_frame(perf__rollout_wait_s=0.8, sample__rollout_queue_size=None, rollout__backpressure_s=1.0)


@pytest.mark.parametrize(
    ("make", "reason", "action"),
    [
        (nothing_logged, "has not logged a step", "Let it run on"),
        (foreign_metrics, "logged none of perf/rollout_wait_s", "Log the run"),
        (only_nan, "never had a finite value", "Log the run"),
        (warmup_only, "none of the 5 logged steps can be used: the first 5 are warm-up", "3 steps after the first 5"),
        (hardly_more, "only 2 of the 7 logged steps can be used", "Let it run on"),
        (
            full_and_waiting,
            r"contradicts itself: the queue is full \(220 of 256\) while the trainer waits 40 %",
            "parts",
        ),
        (brimful_and_waiting_a_little, "contradicts itself: .* waits 10 %", "parts of the run"),
        (changed_midway, "first half of the run is trainer-bound and the second generation-bound", "parts of the run"),
        (no_queue, "waits 0.5 % .*, but sample/rollout_queue_size is not logged", "Log the run"),
        (waiting_without_queue, "waits 15 % .*, but sample/rollout_queue_size is not logged", "Log the run"),
        (empty_queue_without_wait, r"nearly empty \(5 of 256\), but perf/rollout_wait_s is not logged", "Log the run"),
        (neither, "neither perf/rollout_wait_s nor sample/rollout_queue_size is logged", "Log the run"),
        (other_recipe, "the queue holds 400 samples, which rollout.queue_maxsize 256 does not allow", "its own recipe"),
        (step_beyond_the_queue, "a step takes more samples than the queue holds", "rollout.queue_maxsize"),
        (held_back_and_waiting, "contradicts itself: finished rollouts are held back by a full queue", "parts"),
    ],
)
def test_undetermined_rather_than_a_guess(make: Callable[[], pd.DataFrame], reason: str, action: str) -> None:
    verdict = diagnose(make(), local_recipe())

    assert verdict.bound == "undetermined"
    assert verdict.confidence == "low"
    assert verdict.cause is None
    assert re.search(reason, verdict.reason)
    assert verdict.headline == f"Undetermined: {verdict.reason}."
    assert re.search(action, verdict.next_action)


def test_an_unknown_queue_size_asks_for_the_recipe() -> None:
    verdict = diagnose(flat_frame(rollout__inflight=None))

    assert verdict.bound == "undetermined"
    assert "how many samples the queue may hold is not known (200 are in it)" in verdict.reason
    assert "recipe" in verdict.next_action


@pytest.mark.parametrize(
    ("wait", "queue", "blocked", "bound"),
    [
        (0.0, 200.0, None, "trainer"),
        (0.01, 140.0, None, "trainer"),  # 0.5 % of the step, 62 % of a full reading
        (0.09, 140.0, None, "trainer"),  # 4.5 % with two steps' samples ready: fetching
        (0.0, 100.0, None, "trainer"),  # never short of samples, and 45 % of a full reading ahead
        (0.06, 60.0, None, "balanced"),
        (0.0, 5.0, None, "balanced"),
        (0.0, 100.0, 1.0, "trainer"),  # rollouts are held back in every step, and the trainer never waits
        (0.0, None, 1.0, "trainer"),
        (0.0, None, None, "balanced"),
        (0.12, 5.0, None, "generation"),
        (0.12, 100.0, None, "generation"),
        (0.12, 180.0, None, "trainer"),
        (0.12, 220.0, None, "undetermined"),
        (0.5, 5.0, None, "generation"),
        (0.5, 100.0, None, "generation"),
        (0.5, None, None, "generation"),
        (0.5, 200.0, None, "undetermined"),
        (None, 200.0, None, "trainer"),
        (None, None, 1.0, "trainer"),
        (None, 100.0, None, "undetermined"),
    ],
)
def test_wait_and_queue_decide(wait: float | None, queue: float | None, blocked: float | None, bound: str) -> None:
    frame = flat_frame(perf__rollout_wait_s=wait, sample__rollout_queue_size=queue, rollout__backpressure_s=blocked)

    assert diagnose(frame, local_recipe()).bound == bound


def test_a_trainer_that_waits_in_front_of_a_filled_queue_is_not_surely_the_slower_side() -> None:
    sure, doubtful = (
        diagnose(flat_frame(perf__rollout_wait_s=wait, sample__rollout_queue_size=200.0), local_recipe())
        for wait in (0.0, 0.12)
    )

    assert (sure.bound, sure.confidence) == ("trainer", "high")
    assert (doubtful.bound, doubtful.confidence) == ("trainer", "medium")


def test_headlines_tell_both_signs() -> None:
    partly = flat_frame(sample__rollout_queue_size=100.0, rollout__backpressure_s=0.5)
    unknown_wait = flat_frame(perf__rollout_wait_s=None)
    balanced = flat_frame(perf__rollout_wait_s=0.06, sample__rollout_queue_size=60.0)

    assert [diagnose(frame, local_recipe()).headline for frame in (partly, unknown_wait, balanced)] == [
        "Trainer-bound: forward+backward takes 50 % of the step and finished rollouts are held back in 100 % of the "
        "steps.",
        "Trainer-bound: generation is faster and the queue is mostly full (200 of 256).",
        "Balanced: the trainer waits 3 % of the step for rollouts and the queue is partly filled (60 of 256).",
    ]


def test_phases_longer_than_their_step_are_doubted() -> None:
    verdict = diagnose(flat_frame(perf__fwd_bwd_s=2.5), local_recipe())

    assert (verdict.bound, verdict.confidence) == ("trainer", "low")
    assert verdict.shares == {}
    assert "the phases add up to 140 % of perf/step_s" in verdict.reason
    assert "The phases in the log add up to 140 % of the step's 2 s." in reads(verdict)["perf/step_s"]


def test_clocks_that_overlap_a_little_are_not_doubted() -> None:
    verdict = diagnose(flat_frame(perf__fwd_bwd_s=1.75), local_recipe())

    assert (verdict.bound, verdict.confidence) == ("trainer", "high")
    assert sum(verdict.shares.values()) == pytest.approx(1, abs=1e-9)
    assert verdict.shares["other"] == 0


def test_without_a_step_time_the_wait_is_bounded_from_above() -> None:
    verdict = diagnose(
        flat_frame(perf__step_s=None, perf__rollout_wait_s=1.0, sample__rollout_queue_size=5.0), local_recipe()
    )

    assert (verdict.bound, verdict.confidence, verdict.shares) == ("generation", "medium", {})
    assert verdict.signals["wait_share"] == pytest.approx(1.0 / 2.3)
    assert "waits at most 43 % of the step" in verdict.headline


TRAINER: dict[str, float | None] = {"perf__rollout_wait_s": 0.0}
GENERATION: dict[str, float | None] = {"perf__rollout_wait_s": 0.6, "sample__rollout_queue_size": 5.0}
FULL_CACHES = {"rollout__kv_cache_usage": 0.98, "rollout__vllm_queued_requests": 38.0}
CHECKPOINTING = "train.gradient_checkpointing=true"
COMPUTE, RATE = "the trainer's own compute", "the replicas' generation rate"


@pytest.mark.parametrize(
    ("metrics", "override", "cause", "action"),
    [
        (
            TRAINER | {"batch__samples_per_row": 1.0, "batch__row_tokens_mean": 30.0},
            "train.token_budget=0",
            "tiny",
            "train.token_budget=512",
        ),
        # One sample in a row is not tiny when it is a long one.
        (TRAINER | {"batch__samples_per_row": 1.0, "batch__row_tokens_mean": 6000.0}, None, COMPUTE, "train.processes"),
        (TRAINER | {"batch__samples_per_row": 8.0, "perf__fwd_s": 0.25}, CHECKPOINTING, "twice", "checkpointing=false"),
        (TRAINER | {"perf__fwd_s": 0.25}, "train.gradient_checkpointing=false", COMPUTE, "train.processes"),
        (TRAINER | {"perf__fwd_s": 0.33}, CHECKPOINTING, COMPUTE, "train.processes"),
        (
            TRAINER | {"perf__fwd_bwd_s": 0.4, "perf__weight_sync_s": 0.9},
            None,
            "sync (45 %",
            "rollout.weight_sync_steps",
        ),
        (TRAINER | {"perf__fwd_bwd_s": 0.4}, None, "outside the phases", "train.save_steps"),
        (
            TRAINER | {"perf__weight_sync_s": 0.5},
            "transport.kind=merged",
            "sync takes 25 %",
            "sync, raise rollout.weight_",
        ),
        (
            TRAINER | {"perf__weight_sync_s": 0.6},
            None,
            "sync takes 30 %",
            "raise rollout.weight_sync_steps from 1 to 2",
        ),
        (TRAINER | {"perf__mfu_fwd_bwd": 31.2}, None, "compute at 31.2 % MFU", "train.processes"),
        (GENERATION, None, "in-flight limit (rollout.max_inflight_tasks 64)", "max_inflight_tasks from 64 to 128."),
        # No idle slots, no use of more requests.
        (GENERATION, "serve.max_num_seqs=64", RATE, "more machines"),
        (GENERATION | {"rollout__inflight": 40.0}, "engine=sim", RATE, "serve.replicas from 1 to 2"),
        (GENERATION | {"rollout__inflight": 40.0}, None, RATE, "more machines"),
        # Four steps' worth of samples are as many as can be trained on in time.
        (GENERATION | {"batch__samples_per_step": 16.0}, None, RATE, "more machines"),
        (GENERATION | {"batch__samples_per_step": 20.0}, None, "in-flight limit", "max_inflight_tasks from 64 to 80."),
        # Under an adaptive cap the gauge still shows the limit, but the cap decides.
        (GENERATION, "cap.policy=published", RATE, "more machines"),
        (GENERATION | {"rollout__inflight_cap": 24.0}, "cap.policy=rlkit", RATE, "more machines"),
        # A cap that stands at the limit does not.
        (GENERATION | {"rollout__inflight_cap": 64.0}, "cap.policy=rlkit", "in-flight limit", "from 64 to 128."),
        # Nor does anything in flight help that the caches have no room for.
        (GENERATION | FULL_CACHES, None, "full KV caches (98 % in use, 38 requests wait", "cap.policy=rlkit"),
        (GENERATION | FULL_CACHES, "cap.policy=rlkit", "full KV caches", "Give the replicas more cache"),
        (GENERATION | FULL_CACHES | {"rollout__kv_cache_usage": 0.5}, None, "in-flight limit", "from 64 to 128."),
        (GENERATION | {"rollout__score_block_s": 0.5}, None, "scoring", "reward (rlkit.training.rewards:toy_sum)"),
        # Nor does scoring hold anything up when it is held up itself, by the full queue behind it.
        (
            GENERATION | {"rollout__score_block_s": 0.5, "rollout__backpressure_s": 0.1},
            None,
            "in-flight",
            "max_inflight",
        ),
        # More in flight would only be thrown away, too.
        (GENERATION | {"sample__dropped_stale_total": 20.0}, None, "stale (31.2 for every 100", "cap.policy=rlkit"),
        (GENERATION | {"rollout__inflight": None, "perf__weight_sync_s": 0.3}, None, RATE, "more machines"),
    ],
)
def test_causes(metrics: dict[str, float | None], override: str | None, cause: str, action: str) -> None:
    verdict = diagnose(flat_frame(**metrics), local_recipe(*([] if override is None else [override])))

    assert verdict.cause is not None
    assert cause in verdict.cause
    assert action in verdict.next_action


def test_the_new_in_flight_limit_follows_what_is_missing() -> None:
    """A trainer that waits four fifths of the step could take five times the samples."""
    metrics = GENERATION | {"perf__rollout_wait_s": 1.8, "perf__step_s": 2.25, "rollout__inflight": 8.0}
    metrics["perf__fwd_bwd_s"] = 0.1

    verdict = diagnose(flat_frame(**metrics), local_recipe("rollout.max_inflight_tasks=8"))

    assert "rollout.max_inflight_tasks from 8 to 40." in verdict.next_action


def test_the_new_queue_holds_no_more_than_is_trained_on_in_time() -> None:
    """Of 5 x 64 samples that are, 128 may be in flight: the queue gets the 192 that are left, not twice as many."""
    recipe = local_recipe("rollout.max_staleness=5", "rollout.queue_maxsize=100")

    verdict = diagnose(flat_frame(**GENERATION), recipe)

    assert "max_inflight_tasks from 64 to 128 and rollout.queue_maxsize from 100 to 192." in verdict.next_action


@pytest.mark.parametrize("bound", ["trainer", "generation", "balanced"])
def test_every_action_names_a_field_of_the_recipe(bound: str) -> None:
    balanced: dict[str, float | None] = {"sample__rollout_queue_size": 60.0, "perf__rollout_wait_s": 0.06}
    metrics = {"trainer": TRAINER, "generation": GENERATION, "balanced": balanced}[bound]
    for recipe in (local_recipe(), None):
        verdict = diagnose(flat_frame(rollout__backpressure_s=1.0 if bound == "trainer" else None, **metrics), recipe)
        if recipe is not None:
            assert verdict.bound == bound
        assert "train." in verdict.next_action or "serve." in verdict.next_action or "rollout." in verdict.next_action


def test_a_verdict_is_json() -> None:
    verdict = diagnose(published_frame("r1-dp2"), published_recipe("r1-dp2"))

    text = json.dumps(verdict.model_dump(mode="json"), allow_nan=False)

    assert Verdict.model_validate_json(text) == verdict
    assert list(verdict.shares) == ["forward_backward", "rollout_wait", "weight_sync", "optimizer", "other"]


NAMES = [
    "perf/step_s", "perf/fwd_bwd_s", "perf/fwd_s", "perf/optimizer_s", "perf/rollout_wait_s", "perf/weight_sync_s",
    "sample/rollout_queue_size", "batch/samples_per_step", "batch/samples_per_row", "batch/row_tokens_mean",
    "batch/forwarded_tokens_per_step", "rollout/backpressure_s", "rollout/score_block_s", "rollout/inflight",
    "rollout/generated_tok_s", "sample/dropped_stale_total", "sample/staleness_mean", "sample/staleness_max",
    "sample/forwarded_tokens_mean", "perf/mfu_fwd_bwd", "perf/mfu_wall_clock", "reward",
]  # fmt: skip
MEASUREMENTS = st.one_of(
    st.floats(0, 1000), st.floats(), st.just(np.nan), st.just(np.inf), st.floats(-10, 0), st.just(0.0)
)
RECIPES = [None, *(published_recipe(name) for name in CHASE), local_recipe("rollout.max_staleness=0")]


@st.composite
def frames(draw: st.DrawFn) -> pd.DataFrame:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=len(NAMES)))  # the same name twice is possible
    length = draw(st.integers(0, 30))
    columns = []
    for _ in names:
        constant = draw(st.none() | MEASUREMENTS)
        columns.append(
            [constant] * length
            if constant is not None
            else draw(st.lists(MEASUREMENTS, min_size=length, max_size=length))
        )
    index = draw(st.sampled_from(["range", "tens", "constant", "text"]))
    labels = {"range": range(length), "tens": range(10, 10 * length + 10, 10), "constant": [3] * length,
              "text": [f"s{i}" for i in range(length)]}[index]  # fmt: skip
    return pd.concat(
        [
            pd.Series(values, index=list(labels), name=name, dtype="float64")
            for name, values in zip(names, columns, strict=True)
        ]
        or [pd.Series(dtype="float64", index=list(labels))],
        axis=1,
    )


@settings(deadline=None)
@given(frames(), st.sampled_from(RECIPES))
@example(flat_frame().astype(object).replace(2.0, "n/a"), RECIPES[1])
@example(pd.DataFrame(index=[1, 2, 3]), None)
def test_any_frame_gets_an_opinion(frame: pd.DataFrame, recipe: Recipe | None) -> None:
    verdict = diagnose(frame, recipe)

    assert verdict.shares == {} or sum(verdict.shares.values()) == pytest.approx(1, abs=1e-6)
    assert all(0 <= share <= 1 for share in verdict.shares.values())
    assert verdict.headline
    assert verdict.headline.endswith(".")
    assert verdict.next_action.endswith(".")
    assert (verdict.cause is None) == (verdict.bound in ("balanced", "stalled", "undetermined"))
    json.dumps(verdict.model_dump(mode="json"), allow_nan=False)


@settings(deadline=None)
@given(st.floats(0, 2), st.floats(0, 256))
def test_more_waiting_never_looks_more_trainer_bound(wait: float, queue: float) -> None:
    order = {"trainer": 0, "balanced": 1, "undetermined": 2, "generation": 2}
    recipe = RECIPES[-1]
    less, more = (
        diagnose(
            flat_frame(
                perf__rollout_wait_s=w,
                sample__rollout_queue_size=queue,
                perf__fwd_bwd_s=0.0,
                perf__weight_sync_s=0.0,
                perf__optimizer_s=0.0,
            ),
            recipe,
        )
        for w in (wait / 2, wait)
    )

    assert order[less.bound] <= order[more.bound]


def test_a_slow_pause_is_no_reason_to_shorten_the_retry() -> None:
    slow = {"perf__weight_sync_s": 2.0, "perf__weight_sync_barrier_s": 0.0, "perf__weight_sync_transfer_s": 0.1}
    pause = flat_frame(**slow, perf__weight_sync_pause_s=1.8)
    load = flat_frame(**slow, perf__weight_sync_pause_s=0.1)
    recipe = local_recipe().with_overrides(["transport.retry_s=1.5"])
    assert "transport.retry_s" not in shorten_sync(measure(pause, recipe), recipe)
    assert "transport.retry_s from 1.5 to 0.5" in shorten_sync(measure(load, recipe), recipe)
    assert "transport.retry_s" not in shorten_sync(measure(load, local_recipe()), local_recipe())  # as short as it gets
