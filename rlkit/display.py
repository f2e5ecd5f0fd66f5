"""What notebooks show that is not a figure: the verdict, shares of the step, tables. Values in, HTML or a frame out.

The HTML looks right in JupyterLab with the little style it carries; `report_template/report.css` dresses the same class
names up for reports. Whatever comes from a recipe, a run's name or an error is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
from IPython.display import HTML

from rlkit.chart import BLUE, GREEN, GREY, PURPLE, VERMILLION
from rlkit.diagnosis import Verdict
from rlkit.errors import BadInput
from rlkit.figures import PHASES
from rlkit.preflight import Finding
from rlkit.previous_run import PreviousRun
from rlkit.recipe import Recipe
from rlkit.tracking import list_runs
from rlkit.wording import number, percent

# Below this share of the bar its number does not fit in; the legend has it anyway.
_LABELLED_SHARE = 0.06
# The colour of the side that bounds a run is that of its phase in the figures.
_EDGES = {"trainer": BLUE, "generation": VERMILLION, "sync": PURPLE, "balanced": GREEN}
_WHITE_TEXT_ON = (BLUE,)  # black on the other phases' colours has twice the contrast


def headline(verdict: Verdict, facts: Mapping[str, object] | None = None) -> HTML:
    """The verdict and the next action in one bold sentence; below it, small, the confidence and `facts`."""
    action = verdict.next_action[:1].lower() + verdict.next_action[1:]
    small = {"confidence": verdict.confidence} | dict(facts or {})
    return statement(f"{verdict.headline} Next: {action}", small, edge=_EDGES.get(verdict.bound, GREY))


def readiness(recipe: Recipe, findings: Sequence[Finding]) -> HTML:
    """Whether a recipe can be launched here, in one bold sentence with the next action."""
    errors = [finding for finding in findings if finding.severity == "error"]
    counts = f"{len(errors)} error{'s' * (len(errors) != 1)}, {len(findings) - len(errors)} warning"
    counts += "s" * (len(findings) - len(errors) != 1)
    if errors:
        return statement(f"Not ready: {counts}. Next: {errors[0]}.", edge=VERMILLION)
    size = f"{recipe.train.steps} steps with {recipe.serve.replicas} replica{'s' * (recipe.serve.replicas > 1)}"
    return statement(
        f"Ready: {size} on engine {recipe.engine}, {counts}. Next: press Start the run, or set dry_run = False.",
        edge=GREEN,
    )


def statement(sentence: str, facts: Mapping[str, object] | None = None, edge: str = GREY) -> HTML:
    """One bold sentence with a coloured edge and, small below it, facts as `name value`."""
    small = " · ".join(escape(f"{name} {value}") for name, value in (facts or {}).items())
    return html(
        f'<div class="rlkit-verdict" style="border-left: 5px solid {edge}; padding-left: 16px">'
        f'<p role="heading" aria-level="1" style="font-size: 1.25em"><strong>{escape(sentence)}</strong></p>'
        f"{f'<p>{small}</p>' if small else ''}</div>"
    )


def shares(verdict: Verdict) -> HTML:
    """The phases of an average step as one bar, with a legend that has the numbers."""
    known = [(words, verdict.shares.get(name, 0.0), colour) for name, words, _, colour in PHASES]
    known = [(words, share, colour) for words, share, colour in known if share > 0]
    if not known:
        return note("How a step divides is unknown: its times were not logged.")
    bar = "".join(
        f'<span style="flex: 0 0 {100 * share:.3f}%; background: {colour}; overflow: hidden; text-align: center;'
        f' color: {"white" if colour in _WHITE_TEXT_ON else "black"}">'
        f"{percent(share) if share >= _LABELLED_SHARE else '&nbsp;'}</span>"
        for _, share, colour in known
    )
    legend = "".join(
        f'<span style="margin-right: 20px; white-space: nowrap"><span style="display: inline-block; width: 10px;'
        f' height: 10px; margin-right: 6px; background: {colour}"></span>{words} {percent(share)}</span> '
        for words, share, colour in known
    )
    return html(
        f'<div class="rlkit-shares"><div aria-hidden="true" style="display: flex; line-height: 2.2">{bar}</div>'
        f"<p>{legend}</p></div>"
    )


def evidence(verdict: Verdict) -> pd.DataFrame:
    """What the verdict rests on, a row each: a sentence, the metric, its value with the unit."""
    rows = [(item.sentence, item.metric, f"{number(item.value)}\u00a0{item.unit}".strip()) for item in verdict.evidence]
    return pd.DataFrame(rows, columns=["Evidence", "Metric", "Value"])


def findings(found: Sequence[Finding]) -> pd.DataFrame:
    """What preflight found, errors first, and what to change."""
    ordered = sorted(found, key=lambda finding: finding.severity != "error")
    rows = [(finding.severity, finding.field, finding.message, finding.fix) for finding in ordered]
    return pd.DataFrame(rows, columns=["Severity", "Field", "What is wrong", "What to do"])


def settings(recipe: Recipe) -> pd.DataFrame:
    """What a recipe sets differently from the defaults: a row per section, as `field value` pairs."""
    rows = []
    for section, value in recipe.model_dump(mode="json", exclude_defaults=True).items():
        pairs = [f"{name} {_plain(setting)}" for name, setting in value.items()] if isinstance(value, dict) else []
        rows.append((section, " · ".join(pairs) if pairs else _plain(value)))
    return pd.DataFrame(rows, columns=["Section", "Settings that are not the default"])


def changes(previous: PreviousRun | None, recipe: Recipe | None) -> HTML:
    """What a recipe has differently from that of the run before it: a sentence that names it, and a table."""
    if previous is None or recipe is None:
        return note("No earlier run of this project kept a recipe to compare with.")
    found = previous.changes(recipe)
    if found.empty:
        return note(f"The same recipe as the run before it, {previous.name}.")
    count = f"{len(found)} field{'s' * (len(found) > 1)} changed since the run before it, {previous.name}:"
    return html(f"{note(count).data}{table(found).data}")


def runs(project: str, source: str = "") -> pd.DataFrame:
    """The runs of a trackio project, newest first; none where the project cannot be read from here."""
    try:
        known = list_runs(project, source or None)
    except BadInput:
        return pd.DataFrame()
    rows = [
        (row["name"], row["steps"], *(_moment(row[time]) for time in ("created", "last_update")))
        for row in known.iloc[::-1].to_dict("records")
    ]
    return pd.DataFrame(rows, columns=["Run", "Steps", "Started (UTC)", "Last step (UTC)"])


def pairs(values: Mapping[str, object], names: tuple[str, str]) -> pd.DataFrame:
    """A mapping as a frame of two columns called `names`."""
    return pd.DataFrame([(key, _plain(value)) for key, value in values.items()], columns=list(names))


def replicas(proxy: Mapping[str, Any]) -> pd.DataFrame:
    """Requests per replica as the proxy counted them (proxy.json), beside vLLM's own counters since the run began."""
    rows = []
    for index, replica in enumerate(proxy.get("per_replica", [])):
        after, before = replica.get("vllm") or {}, replica.get("vllm_before") or {}
        own = {
            name: _difference(after.get(name), before.get(name))
            for name in ("request_success_total", "preemptions_total", "prefix_hits_total", "prefix_queries_total")
        }
        hits, queries = own["prefix_hits_total"], own["prefix_queries_total"]
        cached = percent(hits / queries) if hits is not None and queries else "unknown"
        counted = [replica.get(name) for name in ("routed", "completed", "failed")]
        rows.append((f"replica {index}", *counted, own["request_success_total"], own["preemptions_total"], cached))
    columns = ["Replica", "Routed", "Completed", "Failed", "Finished by vLLM", "Preemptions", "Prompt tokens cached"]
    return pd.DataFrame(rows, columns=columns)


def adapters(proxy: Mapping[str, Any]) -> HTML:
    """How the new adapter versions reached the replicas, in a sentence."""
    loads = proxy.get("adapters", [])
    if not loads:
        return note("The proxy loaded no adapter.")
    accepted = [load for load in loads if load["ok"]]
    again = sum(max(0, attempts - 1) for load in loads for attempts in load["attempts"])
    slow = max((load["seconds"] for load in accepted), default=0.0)
    return note(
        f"{len(accepted)} of {len(loads)} adapter versions were accepted by every replica, in at most"
        f" {number(slow)} s; {again} loads were sent again."
    )


def accuracy(evaluation: Mapping[str, Any]) -> HTML:
    """Greedy accuracy on prompts never trained on, before and after (evaluation.json), in a sentence."""
    if not evaluation:
        return note("No accuracy on prompts never trained on: the run left no evaluation.")
    return note(
        f"Greedy accuracy on {evaluation['prompts']} prompts it never trained on: {percent(evaluation['base'])} before,"
        f" {percent(evaluation['trained'])} after."
    )


def note(text: str) -> HTML:
    """A sentence between tables and figures."""
    return html(f"<p>{escape(text)}</p>")


def table(frame: pd.DataFrame, when_empty: str = "Nothing to show.", links: Sequence[str] = ()) -> HTML:
    """A frame as a table: every value in full, no index, numbers on the right. Without rows, a sentence instead.

    `links` are where the first column's values lead to, one a row; none at all where they lead nowhere.
    """
    if frame.empty:
        return note(when_empty)
    kinds = [' class="number"' if pd.api.types.is_numeric_dtype(frame[name]) else "" for name in frame.columns]
    head = "".join(f"<th{kind}>{escape(str(name))}</th>" for name, kind in zip(frame.columns, kinds, strict=True))
    cells = [[_unbroken(escape(_plain(value))) for value in row] for row in frame.itertuples(index=False)]
    for row, link in zip(cells, links, strict=False):
        row[0] = f'<a href="{escape(link)}">{row[0]}</a>'
    rows = ["".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) for row in cells]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return html(
        '<div class="table-scroll" role="group" aria-label="Table" tabindex="0">'
        f'<table class="rlkit"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(title: str, text: str) -> HTML:
    """Long text behind a title to click on; left out in print."""
    return html(f'<details><summary>{escape(title)}</summary><pre tabindex="0">{escape(text)}</pre></details>')


def commands(lines: Mapping[str, str]) -> HTML:
    """Shell commands to copy, each with what it does as a comment."""
    width = max(map(len, lines), default=0)
    text = "\n".join(f"{command:<{width}}  # {what}" for command, what in lines.items())
    return html(f"<pre>{escape(text)}</pre>")


def html(text: str) -> HTML:
    """Markup as a notebook shows it."""
    return HTML(text)  # type: ignore[no-untyped-call]  # IPython's is untyped


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None else after - (before or 0)


def _moment(time: pd.Timestamp) -> str:
    return "unknown" if pd.isna(time) else f"{time:%Y-%m-%d %H:%M}"


def _unbroken(text: str) -> str:
    """No line break between a number and its unit."""
    return text.replace(" %", "&nbsp;%")


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value != value:  # a frame has NaN where a counter is not known
        return "unknown"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.6g}"
    return str(value)
