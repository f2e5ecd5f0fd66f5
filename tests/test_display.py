"""What notebooks show beside figures, read back as text."""

from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pytest
from html_page import Page
from IPython.display import HTML
from recorded_runs import recipe, recorded
from run_folders import EVALUATION, PROXY

from rlkit import display
from rlkit.diagnosis import Verdict, diagnose
from rlkit.figures import PHASES
from rlkit.preflight import Finding
from rlkit.tracking import write_run


def verdict(run: str = "trainer-bound-run") -> Verdict:
    return diagnose(recorded(run), recipe())


def shown(html: HTML) -> Page:
    return Page(html.data)


def test_the_runs_of_a_project_newest_first() -> None:
    for name, day in (("older", 5), ("newer", 6)):
        write_run("shared", name, [{"global_step": 3.0, "reward": 0.5}], [datetime(2026, 1, day, 12, tzinfo=UTC)])
    table = display.runs("shared")
    assert table["Run"].tolist() == ["newer", "older"]
    assert table["Started (UTC)"].tolist() == ["2026-01-06 12:00", "2026-01-05 12:00"]
    assert display.runs("nothing").empty


def test_the_headline_is_one_bold_sentence_with_the_verdict_its_numbers_and_the_next_action() -> None:
    page = shown(display.headline(verdict(), {"run": "<r1>"}))
    assert page.first_bold.startswith(
        "Trainer-bound: forward+backward takes 87 % of the step and the queue is mostly full (198 of 256). "
        "Next: pack samples"
    )
    assert page.lines == [page.first_bold, "confidence medium · run <r1>"]


def test_the_edge_of_a_verdict_has_the_colour_of_the_side_that_bounds_it() -> None:
    edges = {
        bound: display.headline(verdict().model_copy(update={"bound": bound})).data.split("solid ")[1][:7]
        for bound in ("trainer", "generation", "balanced", "undetermined")
    }
    assert len(set(edges.values())) == 4
    colours = {name: colour for name, _, _, colour in PHASES}
    assert edges["trainer"] == colours["forward_backward"]
    assert edges["generation"] == colours["rollout_wait"]


def test_the_shares_are_in_the_legend_to_the_last_phase() -> None:
    page = shown(display.shares(verdict()))
    for part in ("forward + backward 87 %", "waiting for rollouts 0.7 %", "optimizer under 0.1 %", "other 8 %"):
        assert part in page.lines
    unknown = verdict().model_copy(update={"shares": {}})
    assert "unknown" in shown(display.shares(unknown)).text


def test_evidence_has_a_row_per_sentence_with_metric_and_unit() -> None:
    found = verdict()
    frame = display.evidence(found)
    assert frame["Metric"].tolist() == [item.metric for item in found.evidence]
    assert frame["Evidence"].tolist() == [item.sentence for item in found.evidence]
    assert frame["Value"][0] == "3.41\u00a0s"


def test_readiness_says_ready_or_the_first_error() -> None:
    warning = Finding("warning", "serve.replicas", "too many", "use one")
    error = Finding("error", "serve.max_loras", "2 is too few", "set it to 6")
    assert shown(display.readiness(recipe(), [warning])).first_bold == (
        "Ready: 50 steps with 1 replica on engine local, 0 errors, 1 warning."
        " Next: press Start the run, or set dry_run = False."
    )
    assert shown(display.readiness(recipe(), [warning, error])).first_bold == (
        "Not ready: 1 error, 1 warning. Next: serve.max_loras: 2 is too few; set it to 6."
    )
    assert display.findings([warning, error])["Severity"].tolist() == ["error", "warning"]


def test_settings_are_those_a_recipe_changes() -> None:
    rows = dict(display.settings(recipe(max_staleness=2)).itertuples(index=False, name=None))
    assert rows["rollout"] == "max_staleness 2 · max_inflight_tasks 64 · queue_maxsize 256"
    assert rows["name"] == "recorded"
    assert "routing" not in rows


def test_replicas_show_the_proxys_counts_beside_vllms_own_since_the_run_began() -> None:
    frame = display.replicas(PROXY)
    assert frame["Routed"].tolist() == [3010, 3030]
    assert frame["Failed"].tolist() == [0, 1]
    assert frame["Finished by vLLM"].tolist() == [3010, 3029]
    assert frame["Prompt tokens cached"].tolist() == ["25 %", "unknown"]
    page = shown(display.table(frame))
    assert page.lines[-2:] == ["unknown", "unknown"]  # no preemptions and no cache counters on that replica
    assert display.replicas({}).empty


def test_adapters_are_counted_with_those_that_were_refused_or_sent_again() -> None:
    refused: dict[str, Any] = {"name": "trl-policy-v3", "ok": False, "seconds": 60.0, "attempts": [1, 9]}
    proxy = {"adapters": [*PROXY["adapters"], refused]}
    assert shown(display.adapters(proxy)).text == (
        "2 of 3 adapter versions were accepted by every replica, in at most 0.61 s; 10 loads were sent again."
    )
    assert "loaded no adapter" in shown(display.adapters({})).text


def test_accuracy_before_and_after() -> None:
    assert "on 200 prompts it never trained on: 12 % before, 98 % after" in shown(display.accuracy(EVALUATION)).text
    assert "no evaluation" in shown(display.accuracy({})).text


def test_a_table_shows_every_value_in_full_and_escaped() -> None:
    long = "x" * 500
    frame = pd.DataFrame({"a <b>": [long, "<i>"], "n": [1234567.0, None], "ok": [True, False]})
    page = shown(display.table(frame))
    assert page.lines == ["a <b>", "n", "ok", long, "1234567", "true", "<i>", "unknown", "false"]
    assert '<th class="number">n</th>' in display.table(frame).data
    assert shown(display.table(frame.iloc[:0], when_empty="Nothing here.")).text == "Nothing here."


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1e-05"), (0.5, "0.5"), (64, "64"), (None, "unknown"), (False, "false"), ([1], "[1]")]
)
def test_pairs_write_values_plainly(value: object, text: str) -> None:
    assert display.pairs({"name": value}, ("Limit", "Value"))["Value"].tolist() == [text]


def test_commands_line_their_comments_up_and_are_escaped_as_folded_text_is() -> None:
    html = display.commands({"rlkit run <a>": "one", "ls": "two"}).data
    assert html == "<pre>rlkit run &lt;a&gt;  # one\nls             # two</pre>"
    assert ">a: &lt;b&gt;</pre>" in display.folded("Recipe", "a: <b>").data
