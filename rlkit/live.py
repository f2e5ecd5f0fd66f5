"""What to show of a run that goes on: what is known of it now in, the panels of a page out. Pure.

A panel is a piece of HTML with a name; a view keeps one widget for each and changes those whose HTML changed. Where the
rows come from is `live_source`'s business, the widgets are `live_view`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from html import escape

import pandas as pd
import plotly.graph_objects as go

from rlkit import display, figures, live_figures
from rlkit.diagnosis import diagnose
from rlkit.recipe import Recipe
from rlkit.signals import column
from rlkit.sketch import STYLE, sketch

Draw = Callable[[pd.DataFrame, Recipe | None], go.Figure]

# The four groups that tell who is slower, then what is admitted, how fresh it is, and what is learned from it.
FIGURES: dict[str, Draw] = {
    "step": lambda frame, recipe: figures.step_time(frame),
    "wait": lambda frame, recipe: live_figures.rollout_wait(frame),
    "queue": lambda frame, recipe: figures.queue(frame, recipe),
    "held back": lambda frame, recipe: live_figures.held_back(frame),
    "in flight": lambda frame, recipe: figures.in_flight(frame, recipe),
    "staleness": lambda frame, recipe: figures.staleness(frame, recipe),
    "reward": lambda frame, recipe: figures.reward(frame, recipe=recipe),
    "ratio": lambda frame, recipe: figures.ratio(frame),
}
PANELS = ("verdict", "progress", *FIGURES)
# Steps whose mean says how long the next ones take: a run's pace changes as completions grow.
RECENT_STEPS = 20


@dataclass(frozen=True)
class Look:
    """What is known of a run at one moment.

    `frame` is as `rlkit.tracking.Run` has it, without rows before the first step; `status` a clause whose subject is
    the run; `over`: it will not go on by itself; `log` the last lines that its engine said; `cap` what the admission
    cap said last, a sentence.
    """

    name: str
    frame: pd.DataFrame
    recipe: Recipe | None
    status: str
    going_on: bool
    over: bool
    at: datetime
    log: tuple[str, ...] = ()
    cap: str = ""


def panels(look: Look, drawn: Mapping[str, str] | None = None) -> dict[str, str]:
    """The HTML of every panel, by the names in `PANELS`; figures are empty before the first step.

    `drawn` are the figures of the very same frame, where they have been drawn before.
    """
    verdict = diagnose(look.frame, look.recipe, now=look.at if look.going_on else None)
    facts = {"run": look.name, "steps": len(look.frame)}
    shown = {"verdict": str(display.headline(verdict, facts).data), "progress": progress(look)}
    if look.frame.empty:
        return shown | dict.fromkeys(FIGURES, "")
    if drawn is not None:
        return shown | {name: drawn[name] for name in FIGURES}
    return shown | {name: sketch(draw(look.frame, look.recipe)) for name, draw in FIGURES.items()}


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The panels of `after` that are not what they were.

    >>> changed({"verdict": "a", "step": "b"}, {"verdict": "a", "step": "c"})
    {'step': 'c'}
    """
    return {name: text for name, text in after.items() if before.get(name) != text}


def progress(look: Look) -> str:
    """Steps of all steps as a bar, what is left in time, the run's state, and its engine's last lines until it logs."""
    step = 0 if look.frame.empty else int(look.frame.index.max())
    total = None if look.recipe is None else look.recipe.train.steps
    said = [f"Step {step:,} of {total:,}" if total else f"Step {step:,}", look.status]
    left = seconds_left(look.frame, step, total) if look.going_on else None
    if left is not None:
        said.insert(1, f"about {_duration(left)} left")
    bar = f'<progress aria-label="Steps" max="{total}" value="{min(step, total)}"></progress> ' if total else ""
    lines = "\n".join(look.log)
    log = f'<pre tabindex="0">{escape(lines)}</pre>' if lines and (look.frame.empty or not look.going_on) else ""
    cap = f"<p>The cap: {escape(look.cap)}</p>" if look.cap else ""
    return f'<p role="status">{bar}{escape(" · ".join(said))}.</p>{cap}{log}'


def seconds_left(frame: pd.DataFrame, step: int, total: int | None) -> float | None:
    """What the steps that are left take at the pace of the last ones; None when that is not known."""
    pace = column(frame, "perf/step_s").dropna().tail(RECENT_STEPS).mean()
    if total is None or pd.isna(pace) or step >= total:
        return None
    return float(pace) * (total - step)


def page(shown: Mapping[str, str]) -> str:
    """All panels as one piece of HTML: what stands in a saved notebook and in a report."""
    drawn = "".join(f"<div>{shown[name]}</div>" for name in FIGURES if shown.get(name))
    grid = "display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px 24px"
    return (
        f'{STYLE}<div class="rlkit-live">{shown["verdict"]}{shown["progress"]}<div style="{grid}">{drawn}</div></div>'
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
