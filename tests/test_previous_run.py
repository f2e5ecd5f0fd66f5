"""The run before a run, what changed since, and the report's JSON twin, which says it too."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from html_page import Page
from recorded_runs import recipe
from run_folders import run_folder

from rlkit import display
from rlkit.past_run import open_past_run
from rlkit.previous_run import PreviousRun, pick_previous
from rlkit.report_data import report_data
from rlkit.tracking import write_run

BEGIN = datetime(2026, 1, 5, 10, tzinfo=UTC)


def log(name: str, hours: float, **config: Any) -> None:
    write_run("recorded", name, [{"global_step": 1.0, "reward": 0.5}], [BEGIN + timedelta(hours=hours)], config)


def known(*hours: float) -> pd.DataFrame:
    times = pd.to_datetime([BEGIN + timedelta(hours=hour) for hour in hours], utc=True)
    return pd.DataFrame({"run_id": [str(n) for n in range(len(hours))], "created": times})


def test_the_newest_that_began_before_is_the_previous() -> None:
    runs = known(0, 1, 2, 3)
    assert pick_previous(runs, "2", BEGIN + timedelta(hours=2)) == "1"
    assert pick_previous(runs, "0", BEGIN) is None
    assert pick_previous(known(), "0", BEGIN) is None


def test_a_run_knows_what_it_changed_since_the_run_before_it(tmp_path: Path) -> None:
    log("first", 0, recipe=recipe(queue_maxsize=128).to_dict())
    past = open_past_run(str(run_folder(tmp_path / "second").path))
    assert past.previous is not None
    assert past.previous.name == "first"
    page = Page(str(display.changes(past.previous, past.recipe).data))
    assert "1 field changed since the run before it, first:" in page.text
    assert page.lines[-3:] == ["rollout.queue_maxsize", "128", "256"]


def test_an_earlier_run_without_a_recipe_is_not_compared_with(tmp_path: Path) -> None:
    log("first", 0)
    past = open_past_run(str(run_folder(tmp_path / "second").path))
    assert past.previous is None
    assert "No earlier run" in str(display.changes(past.previous, past.recipe).data)


def test_the_same_recipe_again_is_said_to_be_the_same() -> None:
    assert "The same recipe as the run before it, one." in str(
        display.changes(PreviousRun("one", recipe()), recipe()).data
    )


def test_the_twin_says_what_the_page_says(tmp_path: Path) -> None:
    log("first", 0, recipe=recipe(queue_maxsize=128).to_dict())
    data = report_data(open_past_run(str(run_folder(tmp_path / "second").path)))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["verdict"]["headline"].startswith("Trainer-bound: ")
    change = {"field": "rollout.queue_maxsize", "before": 128, "now": 256}
    assert data["previous"] == {"run": "first", "changes": [change]}
    assert {entry["side"] for entry in data["ledger"]} == {"trainer", "replicas"}
    assert data["recipe"]["rollout"]["queue_maxsize"] == 256
    assert data["versions"]["trl"] == "1.16.0"
    assert data["evaluation"]["prompts"] == 200
    assert any(command.startswith("rlkit run") for command in data["commands"])


def test_a_run_that_kept_no_recipe_has_a_twin_too() -> None:
    log("bare", 0)
    data = report_data(open_past_run(project="recorded", name="bare"))
    assert (data["recipe"], data["previous"], data["ledger"]) == (None, None, [])


@pytest.mark.parametrize("missing", ["proxy", "evaluation"])
def test_what_a_run_did_not_leave_is_empty(tmp_path: Path, missing: str) -> None:
    folder = run_folder(tmp_path / "run")
    getattr(folder, missing).unlink()
    assert report_data(open_past_run(str(folder.path)))[missing] == {}
