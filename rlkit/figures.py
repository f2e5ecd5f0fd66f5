"""Figures of one run: a frame (and its recipe) in, a plotly figure out. Nothing here reads files or renders.

One function per question. Every figure carries its finding in words, with the numbers, in `layout.meta["alt"]`: reports
use it as the caption and as the text for people who cannot see the figure. A metric that the run never logged is named
in an annotation; it is not an error, because TRL leaves out what it has nothing to say about. `x` is `"step"` or
`"minutes"` (since the first logged step, from the frame's `timestamp` column).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from rlkit import chart
from rlkit.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, Axis
from rlkit.learned import rewards
from rlkit.recipe import Recipe
from rlkit.signals import full_queue_reading
from rlkit.wording import number, percent

# The phases of an optimizer step: name in `Verdict.shares`, words, TRL's metric, colour. "other" is what is left of
# perf/step_s: collation, logging, checkpoints.
PHASES: tuple[tuple[str, str, str | None, str], ...] = (
    ("forward_backward", "forward + backward", "perf/fwd_bwd_s", BLUE),
    ("rollout_wait", "waiting for rollouts", "perf/rollout_wait_s", VERMILLION),
    ("weight_sync", "weight sync", "perf/weight_sync_s", PURPLE),
    ("optimizer", "optimizer", "perf/optimizer_s", GREEN),
    ("other", "other", None, GREY),
)

# In bounds, importance ratios of trainer and server agree to numerical noise; outside, the adapter served is not the
# one trained, or the learning rate is too high for the staleness.
RATIO_BAND = (0.99, 1.01)

# How the router decides (`rlkit.serving.router`), as proxy.json spells it, in the order in which bars are stacked.
DECISION_COLOURS = {"affinity": BLUE, "spilled": VERMILLION, "unmatched": GREY, "round_robin": PURPLE}


def step_time(frame: pd.DataFrame, x: Axis = "step") -> go.Figure:
    """Seconds of every optimizer step, stacked by phase.

    The first step has no perf/step_s (TRL measures from step end to step end) and is left out.
    """
    figure = chart.blank("Where does each step's time go?", "Seconds per step")
    if chart.nothing_logged(figure, frame, ["perf/step_s"]):
        return figure
    steps = frame[frame["perf/step_s"].notna()]
    parts = phase_seconds(steps)
    where = chart.x_values(figure, frame, x)[steps.index]
    for name, words, metric, colour in PHASES:
        if metric is None or chart.logged(steps, metric):
            # Steps, not slopes: a weight sync every fourth step must not look like a ramp.
            chart.line(figure, where, parts[name], words, colour, fill=True, shape="hvh", unit=" s")
    mean, total = parts.mean(), steps["perf/step_s"].mean()
    shown = [(name, words) for name, words, metric, _ in PHASES if metric is None or chart.logged(steps, metric)]
    said = ", ".join(f"{words} {percent(mean[name] / total)}" for name, words in shown)
    chart.describe(
        figure,
        f"Over all {len(steps)} timed steps, the start included, a step takes {number(total)} s on average: {said}.",
    )
    chart.note_missing(figure, [m for _, _, m, _ in PHASES if m is not None and not chart.logged(steps, m)])
    return figure


def phase_seconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds per phase of every step: index as in `frame`, one column per name in `PHASES`.

    A phase that is absent at a step (the weight sync between syncs) took 0 s; `other` is NaN without perf/step_s.
    """
    known = {
        name: frame[metric].fillna(0.0) if metric in frame else pd.Series(0.0, index=frame.index)
        for name, _, metric, _ in PHASES
        if metric is not None
    }
    parts = pd.DataFrame(known)
    # Host clocks of nested timers differ by fractions of a millisecond: a remainder below zero is zero.
    rest = chart.column(frame, "perf/step_s") - parts.sum(axis=1)
    return parts.assign(other=rest.clip(lower=0.0))


def queue(frame: pd.DataFrame, recipe: Recipe | None = None, x: Axis = "step") -> go.Figure:
    """Samples waiting in the rollout queue, against its size and the reading of a full queue.

    TRL reads the size right after taking each sample and averages, so a full queue reads about queue_maxsize minus half
    of the samples of a step.
    """
    metric = "sample/rollout_queue_size"
    figure = chart.blank("Is the rollout queue full or empty?", "Samples in the queue")
    if chart.nothing_logged(figure, frame, [metric]):
        return figure
    chart.line(figure, chart.x_values(figure, frame, x), frame[metric], "queue", BLUE, unit=" samples")
    mean = frame[metric].mean()
    text = f"{number(mean)} samples wait in the queue on average"
    if recipe is not None:
        size = recipe.rollout.queue_maxsize
        chart.limit(figure, size, f"queue_maxsize {size}")
        full = full_queue_reading(recipe.samples_per_step or _mean(frame, "batch/samples_per_step"), recipe)
        if full is not None and full < size:
            chart.limit(figure, full, f"reading of a full queue, about {full:.0f}", dash="dot")
        text += f", {percent(mean / size)} of its size ({size})"
    chart.describe(
        figure, f"{text}. A full queue means that the trainer is the slower side, an empty one the replicas."
    )
    return figure


def waiting(frame: pd.DataFrame, x: Axis = "step") -> go.Figure:
    """Who waits for whom: seconds the trainer waits for samples, and seconds a finished sample waits for the queue.

    Backpressure is a mean over blocked samples only (0.1 s steps) and absent when none was blocked.
    """
    wait, blocked = "perf/rollout_wait_s", "rollout/backpressure_s"
    figure = chart.blank("Who waits for whom?", "Seconds")
    if chart.nothing_logged(figure, frame, [wait, blocked]):
        return figure
    where = chart.x_values(figure, frame, x)
    said = []
    if chart.logged(frame, wait):
        chart.line(figure, where, frame[wait], "trainer waits for rollouts, per step", VERMILLION, unit=" s")
        said.append(f"The trainer waits {number(frame[wait].mean())} s a step for rollouts")
    if chart.logged(frame, blocked):
        label = "a blocked rollout waits for the queue"
        chart.line(figure, where, frame[blocked], label, BLUE, markers=True, unit=" s")
        count = int(frame[blocked].notna().sum())
        said.append(f"rollouts are held back by a full queue in {count} of {len(frame)} steps")
    elif any(str(name).startswith("rollout/") and chart.logged(frame, str(name)) for name in frame):
        said.append("no rollout was held back by a full queue")  # TRL logs it only then
    chart.describe(figure, chart.sentence(said))
    chart.note_missing(figure, [m for m in (wait, blocked) if not chart.logged(frame, m)])
    return figure


def in_flight(frame: pd.DataFrame, recipe: Recipe | None = None, x: Axis = "step") -> go.Figure:
    """Rollouts in flight against their limit, and what the admission cap lets through of them.

    rollout/inflight counts tasks that have not been collected yet, those that wait at the admission gate or in a queue
    included, not what vLLM is running; rollout/inflight_admitted those past the gate.
    """
    metric, admitted, cap = "rollout/inflight", "rollout/inflight_admitted", "rollout/inflight_cap"
    figure = chart.blank("How many rollouts are in flight?", "Rollouts in flight")
    if chart.nothing_logged(figure, frame, [metric]):
        return figure
    where = chart.x_values(figure, frame, x)
    chart.line(figure, where, frame[metric], "in flight", BLUE, unit=" rollouts")
    mean = frame[metric].mean()
    text = f"{number(mean)} rollouts are in flight on average"
    limit = None if recipe is None else recipe.inflight_limit
    if limit is not None:
        chart.limit(figure, limit, f"max_inflight_tasks {limit}")
        text += f", {percent(mean / limit)} of the limit ({limit})" if limit else ""
    if chart.logged(frame, cap) and chart.logged(frame, admitted) and frame[cap].min() < (limit or frame[metric].max()):
        # A gauge that is read every few seconds: steps between two readings are bridged.
        for name, label, colour, dash in ((admitted, "admitted", GREEN, None), (cap, "cap", VERMILLION, "dot")):
            known = frame[name].dropna()
            chart.line(figure, where[known.index], known, label, colour, unit=" rollouts", dash=dash)
        text += f"; the admission cap of {number(frame[cap].min())} to {number(frame[cap].max())} lets through"
        chart.describe(figure, f"{text} {number(frame[admitted].mean())} of them, and holds back what would not fit.")
        return figure
    chart.describe(figure, f"{text}. At the limit, more replicas do not help: they only share the same rollouts.")
    return figure


def staleness(frame: pd.DataFrame, recipe: Recipe | None = None, x: Axis = "step") -> go.Figure:
    """Age of the trained samples in policy versions, against max_staleness; older ones are dropped."""
    mean, oldest, dropped = "sample/staleness_mean", "sample/staleness_max", "sample/dropped_stale_total"
    figure = chart.blank("How old are the samples?", "Policy versions")
    if chart.nothing_logged(figure, frame, [mean, oldest]):
        return figure
    where = chart.x_values(figure, frame, x)
    said = []
    if chart.logged(frame, mean):
        chart.line(figure, where, frame[mean], "mean", BLUE, unit=" versions")
        said.append(f"Trained samples are {number(frame[mean].mean())} policy versions old on average")
    if chart.logged(frame, oldest):
        chart.line(figure, where, frame[oldest], "oldest", ORANGE, dash="dot", shape="hvh", unit=" versions")
        said.append(f"the oldest {number(frame[oldest].max())}")
    if recipe is not None:
        bound = recipe.rollout.max_staleness
        chart.limit(figure, bound, f"max_staleness {bound}")
    lost = chart.column(frame, dropped).sum()
    said.append(f"{number(lost)} samples were dropped as too old" if lost else "none was dropped as too old")
    chart.describe(figure, chart.sentence(said))
    return figure


def reward(frame: pd.DataFrame, x: Axis = "step", window: int | None = None, recipe: Recipe | None = None) -> go.Figure:
    """Mean reward per step, and its mean over the last `window` steps (None: a twentieth of the run, at least 5).

    A simulated run has none, and the figure says so instead of leaving it at that nothing was logged.
    """
    figure = chart.blank("Does it learn?", "Mean reward")
    if recipe is not None and recipe.engine == "sim" and not chart.logged(frame, "reward"):
        chart.say(figure, "reward: not simulated, it has no physics")
        return figure
    if chart.nothing_logged(figure, frame, ["reward"]):
        return figure
    series = frame["reward"].dropna()
    where = chart.x_values(figure, frame, x)[series.index]
    size = max(5, len(series) // 20) if window is None else window
    chart.line(figure, where, series, "each step", SKY, markers=True, width=1.0)
    smooth = series.rolling(size, min_periods=size).mean()
    if smooth.notna().any():
        chart.line(figure, where, smooth, f"mean of the last {size} steps", BLUE, width=3.0)
    told = rewards(frame)
    if told is not None:
        first, last = told
        chart.describe(
            figure,
            f"Mean reward {first:.3f} in the first quarter of the steps, {last:.3f} in the last ({last - first:+.3f}).",
        )
    return figure


def ratio(frame: pd.DataFrame, x: Axis = "step") -> go.Figure:
    """Importance ratio of trainer and server, which stays within `RATIO_BAND` when the right adapter is served."""
    low, high = RATIO_BAND
    figure = chart.blank("Does the server generate with the weights that are trained?", "Importance ratio")
    if chart.nothing_logged(figure, frame, ["ratio"]):
        return figure
    series = frame["ratio"].dropna()
    band = {"name": f"band {low} to {high}", "showlegend": True}
    figure.add_hrect(y0=low, y1=high, fillcolor=GREEN, opacity=0.15, line_width=0, layer="below", **band)
    chart.line(figure, chart.x_values(figure, frame, x)[series.index], series, "ratio", BLUE)
    room = (high - low) / 4
    figure.update_yaxes(range=[min(low - room, series.min() - room), max(high + room, series.max() + room)])
    inside = int(series.between(low, high).sum())
    chart.describe(
        figure,
        f"Ratio between {series.min():.4f} and {series.max():.4f}; within {low} to {high} in {inside} of"
        f" {len(series)} steps.",
    )
    return figure


def mfu(frame: pd.DataFrame, x: Axis = "step") -> go.Figure:
    """Model FLOPs utilisation in percent: of the forward and backward passes alone, and of the whole step.

    Only the gap between the two is comparable across machines and TRL versions.
    """
    busy, whole = "perf/mfu_fwd_bwd", "perf/mfu_wall_clock"
    figure = chart.blank("How much of the compute is used?", "MFU (%)")
    if chart.nothing_logged(figure, frame, [busy, whole]):
        return figure
    where = chart.x_values(figure, frame, x)
    said = []
    for metric, label, colour, dash in (
        (busy, "forward + backward", BLUE, None),
        (whole, "wall clock", VERMILLION, "dash"),
    ):
        if chart.logged(frame, metric):
            chart.line(figure, where, frame[metric], label, colour, dash=dash, unit=" %")
            said.append(f"{label} {number(frame[metric].mean())} %")
    both = frame.dropna(subset=[busy, whole]) if len(said) == 2 else frame.iloc[:0]
    gap = both[whole].mean() / both[busy].mean() if len(both) else float("nan")
    tail = f"; the step keeps {percent(gap)} of what forward and backward reach" if pd.notna(gap) else ""
    chart.describe(figure, f"Mean MFU: {', '.join(said)}{tail}.")
    chart.note_missing(figure, [m for m in (busy, whole) if not chart.logged(frame, m)])
    return figure


def routing(proxy: Mapping[str, Any]) -> go.Figure:
    """Requests by how the proxy routed them, in all and per replica; `proxy` is the content of proxy.json.

    affinity: the prompt's own blocks are cached there. spilled: they are, but that replica was too far ahead.
    unmatched: cached nowhere. A replica whose decisions were not counted apart is shown with the requests it got.
    """
    figure = chart.blank("Where were requests routed, and why?", "")
    total = proxy.get("routed", 0)
    if not total:
        chart.say(figure, "requests through the proxy: none counted")
        return figure
    per_replica = proxy.get("per_replica", [])
    rows = {"all": proxy} | {f"replica {index}": replica for index, replica in enumerate(per_replica)}
    counted = {name: {kind: row.get(kind, 0) for kind in DECISION_COLOURS} for name, row in rows.items()}
    for name, kinds in counted.items():
        kinds["routed"] = rows[name].get("routed", 0) - sum(kinds.values())
    used = [kind for kind in (*DECISION_COLOURS, "routed") if any(kinds[kind] for kinds in counted.values())]
    for kind in used:
        figure.add_trace(
            go.Bar(
                y=list(counted),
                x=[kinds[kind] for kinds in counted.values()],
                name=kind.replace("_", " "),
                orientation="h",
                marker={"color": DECISION_COLOURS.get(kind, GREEN), "line": {"width": 0}},
                hovertemplate="%{x:,} requests",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.35, hovermode="y unified", height=150 + 40 * len(rows))
    figure.update_xaxes(title={"text": "Requests"}, showgrid=True, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    reasons = ", ".join(
        f"{kind.replace('_', ' ')} {percent(proxy[kind] / total)}" for kind in DECISION_COLOURS if proxy.get(kind)
    )
    load = ", ".join(percent(replica.get("routed", 0) / total) for replica in per_replica)
    chart.describe(figure, f"{total:,} requests were routed: {reasons}. Per replica: {load}.")
    return figure


def _mean(frame: pd.DataFrame, metric: str) -> float | None:
    return float(frame[metric].mean()) if chart.logged(frame, metric) else None
