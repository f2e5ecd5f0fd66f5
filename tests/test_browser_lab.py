"""The notebooks and the live view in a real JupyterLab, in a real browser, by keyboard."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from browser import PATIENCE_MS, open_browser
from isolation import isolate
from jupyter_lab import Lab, open_lab
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, expect
from recorded_runs import recipe, recorded
from run_folders import log_run

from rlkit.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.long]
expect.set_options(timeout=PATIENCE_MS)
# Contrast and names, of what is ours; the rest of the window is JupyterLab's.
RULES = ("color-contrast", "button-name", "label", "select-name", "svg-img-alt", "role-img-alt")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as monkeypatch:
        isolate(folder / "trackio", monkeypatch)
        log_run("learning-run", "measured")
        with open_lab(folder) as opened:
            yield opened


def test_a_run_is_chosen_changed_started_and_watched_by_keyboard(lab: Lab, browser: Browser) -> None:
    lab_page = lab.open(browser, "notebooks/01_launch.ipynb")
    page = lab_page.page
    lab_page.run_all()
    form = lab_page.output(2)
    expect(form.get_by_text("Ready: 48 steps", exact=False)).to_be_visible()
    form.get_by_label("engine").select_option("sim")
    steps = form.get_by_label("train.steps")
    steps.focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("0")
    page.keyboard.press("Enter")
    expect(form.get_by_text("Not ready: ", exact=False).first).to_be_visible()
    expect(form.get_by_role("button", name="Start the run")).to_be_disabled()
    steps.focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("30")
    page.keyboard.press("Enter")
    expect(form.get_by_text("Ready: 30 steps", exact=False)).to_be_visible()
    expect(form.get_by_text("Would be bound by")).to_be_visible()
    start = form.get_by_role("button", name="Start the run")
    start.focus()
    page.keyboard.press("Enter")
    expect(form.get_by_text("Step 30 of 30", exact=False)).to_be_visible()
    expect(form.get_by_text("it finished", exact=False)).to_be_visible()
    assert form.locator(".rlkit-sketch svg[role=img]").count() >= 5
    assert lab_page.watched.violations(".jp-Notebook .jp-OutputArea-output", RULES) == []
    assert lab_page.errors() == []
    assert lab_page.outside_requests() == []


@pytest.mark.parametrize("name", ["02_diagnose.ipynb", "03_five_runs.ipynb"])
def test_a_notebook_runs_to_its_end(lab: Lab, browser: Browser, name: str) -> None:
    if not (lab.folder / "notebooks" / name).exists():
        pytest.skip(f"{name} is not there yet")
    if name == "02_diagnose.ipynb":
        _with_parameters(lab.folder / "notebooks" / name, 'project: str = "recorded"')
    lab_page = lab.open(browser, f"notebooks/{name}")
    lab_page.run_all()
    expect(lab_page.page.locator(".js-plotly-plot").first).to_be_visible()
    assert lab_page.errors() == []
    assert lab_page.outside_requests() == []


def test_a_slider_moved_by_keyboard_changes_the_figure(lab: Lab, browser: Browser) -> None:
    if not (lab.folder / "notebooks" / "05_what_if.ipynb").exists():
        pytest.skip("05_what_if.ipynb is not there yet")
    lab_page = lab.open(browser, "notebooks/05_what_if.ipynb")
    lab_page.run_all()
    page = lab_page.page
    slider = page.get_by_role("slider").first
    slider.scroll_into_view_if_needed()
    figures = page.locator(".jp-OutputArea-output:has(svg)")
    expect(figures.first).to_be_visible()
    before = figures.all_inner_texts()
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(figures.first).not_to_have_text(before[0])
    assert lab_page.errors() == []


def test_the_live_view_moves_while_a_run_goes_on_and_its_controls_work(lab: Lab, browser: Browser) -> None:
    folder = RunFolder(lab.folder / "runs" / "out" / "fed")
    folder.path.mkdir(parents=True)
    plan = recipe().with_overrides(["cap.policy=rlkit", "train.steps=5000"])
    folder.recipe.write_text(plan.to_yaml(), encoding="utf-8")
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    state = {"status": "running", "pid": engine.pid, "started": time.time(), "updated": time.time()}
    folder.state.write_text(json.dumps(state), encoding="utf-8")
    cells = [new_code_cell("from rlkit.live_view import live\nlive('runs/out/fed').watch()")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), lab.folder / "watched.ipynb")
    going = threading.Event()
    fed = threading.Thread(target=_feed, args=(folder, going))
    _log(folder, 1, 12)
    try:
        lab_page = lab.open(browser, "watched.ipynb")
        lab_page.run_all()
        page, view = lab_page.page, lab_page.page.locator(".rlkit-live").first
        first = view.locator("progress").get_attribute("value")
        paths = view.locator(".rlkit-sketch svg[role=img] path").first.get_attribute("d")
        fed.start()
        expect(view.locator("progress")).not_to_have_attribute("value", first or "")
        expect(view.locator(".rlkit-sketch svg[role=img] path").first).not_to_have_attribute("d", paths or "")
        expect(view.get_by_text("Generation-bound", exact=False)).to_be_visible()
        most = view.get_by_label("At most in flight")
        most.focus()
        page.keyboard.press("Control+a")
        page.keyboard.type("12")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(view.get_by_text("At most 12 rollouts are admitted", exact=False)).to_be_visible()
        assert json.loads(folder.control.read_text()) == {"max_inflight": 12}
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
            page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
            assert lab_page.watched.violations(".rlkit-live", RULES) == []
        stop = view.get_by_role("button", name="Stop the run")
        stop.focus()
        page.keyboard.press("Enter")
        assert engine.wait(30) != 0
        expect(view.get_by_text("it was killed", exact=False)).to_be_visible()
        expect(stop).to_be_disabled()
        assert lab_page.errors() == []
    finally:
        going.set()
        if fed.ident is not None:
            fed.join()
        engine.kill()
        engine.wait()


def _feed(folder: RunFolder, ended: threading.Event) -> None:
    """Log steps, two a second, until `ended`."""
    for step in itertools.count(13):
        _log(folder, step, step)
        if ended.wait(0.5):
            return


def _log(folder: RunFolder, first: int, last: int) -> None:
    """Log these steps as the trainer does, with a recorded run's numbers."""
    frame = recorded("learning-run").drop(columns="timestamp")
    with folder.steps.open("a", encoding="utf-8") as lines:
        for step in range(first, last + 1):
            row = frame.iloc[(step - 1) % len(frame)].dropna()
            numbers = {str(name): float(value) for name, value in row.items()}
            lines.write(json.dumps({"global_step": step, **numbers}) + "\n")


def _with_parameters(notebook: Path, *lines: str) -> None:
    """Change lines of the copied notebook's cell of parameters, as a user would."""
    content = nbformat.read(notebook, as_version=4)
    cell = next(cell for cell in content.cells if "parameters" in cell.metadata.get("tags", []))
    given = {line.partition(":")[0]: line for line in lines}
    cell.source = "\n".join(given.get(old.partition(":")[0], old) for old in cell.source.splitlines())
    nbformat.write(content, notebook)
