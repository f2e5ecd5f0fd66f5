"""Figures of a routing trace (`rlkit.routing_story.simulated`): frames in, plotly figures out."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from rlkit import chart
from rlkit.chart import BLUE, VERMILLION
from rlkit.figures import DECISION_COLOURS
from rlkit.wording import number, percent

# Stretches of a run that are drawn as one point each: wide enough for the shares to be steady, narrow enough for a sync
# to be seen in a run of forty steps.
STRETCHES = 60

_MISSING = "each decision: recorded of simulated runs only"


def decisions_over_time(trace: pd.DataFrame | None) -> go.Figure:
    """Rollouts a minute by how they were routed, stacked. None or empty: the figure says that nobody recorded them."""
    figure = chart.blank("How were rollouts routed over time?", "Rollouts a minute")
    stretches = _stretches(figure, trace)
    if trace is None or stretches is None:
        return figure
    minutes, width = stretches
    counts = pd.crosstab(minutes, trace["decision"]) / width
    # A stretch in which nobody was admitted has none, rather than no value.
    middles = [(stretch + 0.5) * width for stretch in range(STRETCHES)]
    counts = counts.reindex([at for at in middles if at <= counts.index.max()], fill_value=0.0)
    whole = trace["decision"].value_counts(normalize=True)
    for kind, colour in DECISION_COLOURS.items():
        name = kind.replace("_", "-")
        if name in counts:
            where = pd.Series(counts.index.to_numpy(dtype=float), index=counts.index)
            chart.line(figure, where, counts[name], name, colour, fill=True, shape="hvh", unit=" a minute")
    said = ", ".join(f"{name} {percent(share)}" for name, share in whole.items())
    chart.describe(figure, f"{len(trace):,} rollouts: {said}.")
    return figure


def imbalance_over_time(trace: pd.DataFrame | None, threshold: int) -> go.Figure:
    """By how many requests the busiest replica is ahead of the least loaded one, as each rollout is routed."""
    figure = chart.blank("How far ahead is the busiest replica?", "Requests ahead")
    stretches = _stretches(figure, trace)
    if trace is None or stretches is None:
        return figure
    minutes, _ = stretches
    leads = trace["lead"].groupby(minutes)
    most, mean = leads.max().astype(float), leads.mean()
    where = pd.Series(mean.index.to_numpy(dtype=float), index=mean.index)
    chart.line(figure, where, most, "most in the stretch", VERMILLION, dash="dot", unit=" requests")
    chart.line(figure, where, mean, "mean", BLUE, unit=" requests")
    chart.limit(figure, threshold, f"spill_threshold {threshold}")
    chart.describe(
        figure,
        f"The busiest replica is {number(trace['lead'].mean())} requests ahead on average, at most"
        f" {number(trace['lead'].max())}; a rollout is spilled when the one that holds its prompt is more than"
        f" {threshold} ahead.",
    )
    return figure


def _stretches(figure: go.Figure, trace: pd.DataFrame | None) -> tuple[pd.Series[float], float] | None:
    """The middle of each row's stretch of the run, in minutes, and a stretch's width."""
    if trace is None or trace.empty:
        chart.say(figure, _MISSING)
        return None
    width = max(float(trace["seconds"].max()) / 60 / STRETCHES, 1e-6)
    at: pd.Series[float] = ((trace["seconds"] / 60 // width).clip(upper=STRETCHES - 1) + 0.5) * width
    figure.update_xaxes(title={"text": "Minutes of the run"}, range=[0, STRETCHES * width])
    return at, width
