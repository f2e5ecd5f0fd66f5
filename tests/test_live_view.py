"""The widgets around a run that goes on, without a browser: what changes, what is saved, what its buttons do."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from html_page import Page
from test_live import folder_with, rows

from rlkit.errors import BadInput
from rlkit.live_source import FolderSource
from rlkit.live_view import LiveView, live


def test_it_follows_a_run_to_its_end_in_a_thread(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, os.getpid())
    view = LiveView(FolderSource(folder), every_s=0.05)
    grown = threading.Event()
    view._panel["progress"].observe(lambda change: grown.set() if "Step 6 of" in change["new"] else None, "value")
    view.watch()
    view._lift.click()
    assert "the recipe's own cap is in force again" in view._said.value.replace("&#x27;", "'")
    with folder.steps.open("a") as lines:
        lines.write(json.dumps(rows()[5]) + "\n")
    assert grown.wait(30)
    folder.state.write_text(json.dumps({"status": "finished", "pid": os.getpid()}))
    assert view.wait(30)
    assert "it finished" in view._panel["progress"].value
    assert view._stop.disabled
    assert view._said.value == ""


def test_what_is_saved_is_the_last_state_as_plain_html(tmp_path: Path) -> None:
    bundle = live(str(folder_with(tmp_path, os.getpid(), steps=30).path))._repr_mimebundle_()
    page = Page(bundle["text/html"])
    assert page.first_bold.startswith("Generation-bound: ")
    assert "Step 30 of 50" in page.text
    assert page.external == []
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_its_buttons_set_and_lift_the_limit_within_the_recipes_own(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, os.getpid())
    view = LiveView(FolderSource(folder))
    assert (view._most.max, view._most.value) == (64, 64)
    view._most.value = 5
    view._ask.click()
    assert json.loads(folder.control.read_text()) == {"max_inflight": 5}
    assert "At most 5 rollouts" in view._said.value
    view._lift.click()
    assert json.loads(folder.control.read_text()) == {"max_inflight": None}


def test_what_cannot_be_done_is_said_and_not_raised(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 2**22)
    view = LiveView(FolderSource(folder))
    assert view._stop.disabled
    view._stop.click()
    assert "no run to stop" in view._said.value
    folder.recipe.write_text("steps: [")
    assert view.refresh() is None
    assert "broken YAML" in view._said.value


def test_it_must_be_told_what_to_watch() -> None:
    with pytest.raises(BadInput, match="folder and project are both empty"):
        live()
