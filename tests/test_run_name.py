"""What a command line calls a run: one rule for every command."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import recipe
from run_folders import log_run, run_folder
from test_live import folder_with
from typer.testing import CliRunner, Result

from rlkit import preflight
from rlkit.cli import app
from rlkit.errors import BadInput
from rlkit.recipe import load_recipe
from rlkit.run_folder import RunFolder
from rlkit.run_name import Named, find_folder, folder_of, named, no_run, recipe_of, run_name

LOCAL = Path(__file__).parents[1] / "runs" / "local.yaml"
BEFORE = RunFolder(Path("runs/out/before"))


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "300")


def rlkit(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def holding(path: Path, text: str = "") -> RunFolder:
    """A folder that holds a run, as far as its name goes."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(text)
    return RunFolder(path)


def test_a_path_that_holds_a_run_comes_before_a_name() -> None:
    holding(BEFORE.path)
    assert find_folder("before") == find_folder("runs/out/before") == BEFORE
    Path("before").mkdir()  # some other folder of the name is none
    assert find_folder("before") == BEFORE
    (Path("before") / "recipe.yaml").write_text("")
    assert find_folder("before") == RunFolder(Path("before"))
    assert folder_of(BEFORE.path.absolute()).path == BEFORE.path.absolute()
    assert find_folder("chase/chase-1") is None
    holding(Path("runs/out/chase/chase-1"))
    assert find_folder("chase/chase-1") == RunFolder(Path("runs/out/chase/chase-1"))


def test_who_is_not_there_is_told_with_both_ways_out() -> None:
    holding(BEFORE.path)
    with pytest.raises(BadInput) as failure:
        folder_of("befor")
    assert str(failure.value) == (
        f"befor: no run of that name under {Path.cwd()}/runs/out (did you mean before?); give a run's folder, or the"
        " name of a run under runs/out"
    )
    with pytest.raises(BadInput, match=r"^runs: the folder holds no run \(no recipe.yaml\); give a run's folder"):
        folder_of("runs")


def test_in_the_checkout_it_is_obvious_where_was_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LOCAL.parents[1])
    assert no_run("no-run-is-called-so") == "no such run"
    monkeypatch.chdir(LOCAL.parent)
    assert no_run("no-run-is-called-so") == f"no run of that name under {LOCAL.parent}/runs/out"


def test_a_recipe_is_a_file_or_that_of_a_run() -> None:
    holding(BEFORE.path)
    Path("local.yaml").write_text("")
    assert recipe_of(Path("local.yaml")) == (Path("local.yaml"), None)
    assert recipe_of(Path("before")) == (BEFORE.recipe, BEFORE)
    assert recipe_of(BEFORE.path) == (BEFORE.recipe, BEFORE)
    Path("before").write_text("a recipe without a suffix")
    assert recipe_of(Path("before")) == (Path("before"), None)
    os.mkfifo("pipe")
    assert recipe_of(Path("pipe")) == (Path("pipe"), None)
    with pytest.raises(BadInput, match=r"^gone.yaml: no such recipe; give a recipe \(YAML\), a run's folder, or the"):
        recipe_of(Path("gone.yaml"))


def test_a_project_comes_before_a_name_and_says_so() -> None:
    holding(BEFORE.path)
    assert named("before") == Named(BEFORE)
    assert named("before", source="http://somewhere") == Named(None, "before")  # only trackio is asked for
    assert named("before", run="x") == Named(None, "before", "x")
    log_run("learning-run", "first", recipe().with_overrides(["tracking.project=before"]))
    meant = named("before")
    assert meant == Named(None, "before", "", passed_over=BEFORE)
    assert meant.note("first") == (
        "before: the newest run of the trackio project, first; for the run of that name: runs/out/before"
    )
    assert meant.note("before") is None  # the same run
    assert named("before/first") == Named(None, "before", "first")
    assert named("runs/out/before") == Named(BEFORE)


def test_what_is_nothing_at_all_is_told_with_every_way_out() -> None:
    log_run("learning-run", "first")
    for subject in ("nothing", "runs/out/nope", "/nowhere/at-all", "./nope", "nothing/first"):
        missing = f"no run of that name under {Path.cwd()}/runs/out" if subject == "nothing" else "no such run"
        with pytest.raises(BadInput) as failure:
            named(subject)
        assert str(failure.value) == (
            f"{subject}: {missing}; give a run's folder, the name of a run under runs/out, a trackio project"
            " (there are: recorded), or PROJECT/RUN"
        )
    with pytest.raises(BadInput, match="no such run"):
        named("./nope", source="http://somewhere")
    with pytest.raises(BadInput, match="leave --run and --source out"):
        named(str(holding(BEFORE.path).path), "first")


def test_a_run_elsewhere_is_known_by_its_name_alone() -> None:
    holding(BEFORE.path)
    assert [run_name(one) for one in ("before", "runs/out/before", "r1-dp2")] == ["before", "before", "r1-dp2"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["diagnose"], "Trainer-bound: "),
        (["compare"], "One run, 3.12 s a step, bound by: trainer."),
        (["watch", "--no-alerts"], "step 14: Stalled: the last step was logged"),
        (["calibrate"], "run 'runs/out/before': no rollout/duration_s"),
    ],
    ids=lambda given: given[0],
)
def test_a_bare_name_is_a_run_where_metrics_are_read(
    command: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_second_look(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", no_second_look)
    run_folder(BEFORE.path)
    result = rlkit(*command, "before")
    assert said in result.output, result.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run"], "launched in runs/out/before"),
        (["check"], "looked at runs/out/before"),
        (["predict", "--seeds", "1"], "2 steps, mean and range of 1 simulations"),
    ],
    ids=lambda given: given[0],
)
def test_a_bare_name_is_a_run_where_a_recipe_is_read(
    command: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(recipe: Any, folder: Path) -> preflight.MachineFacts:
        print(f"looked at {folder}")
        return preflight.MachineFacts(reward_problem=None)

    def launch(recipe: Any, folder: RunFolder, *_: object) -> None:
        print(f"launched in {folder.path}")
        raise BadInput("enough")

    monkeypatch.setattr(preflight, "gather_facts", look)
    monkeypatch.setattr("rlkit.engines.launch", launch)
    holding(BEFORE.path, load_recipe(LOCAL, ["train.steps=2"]).to_yaml())
    result = rlkit(*command, "before")
    assert said in result.output, result.output


def test_advice_on_a_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[object, ...]] = []

    def open_run(*what: object) -> None:
        opened.append(what)
        raise BadInput("enough")

    monkeypatch.setattr("rlkit.past_run.open_past_run", open_run)
    holding(BEFORE.path)
    assert rlkit("advise", "before").exit_code == 2
    assert opened == [("runs/out/before", "", "", "")]


def test_a_run_that_goes_on_is_stopped_and_capped_by_its_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/out").mkdir(parents=True)
    folder = folder_with(Path("runs/out"), os.getpid())
    assert rlkit("cap", "mine", "5").exit_code == 0
    assert json.loads(folder.control.read_text()) == {"max_inflight": 5}
    monkeypatch.setattr("rlkit.engines.stopping.ask_to_stop", lambda run: os.getpid())
    result = rlkit("stop", "mine", "--no-wait")
    assert result.stdout == f"runs/out/mine: process {os.getpid()} was asked to stop\n"


def test_the_note_of_a_project_that_was_meant_is_beside_the_answer() -> None:
    log_run("learning-run", "first", recipe().with_overrides(["tracking.project=before"]))
    run_folder(BEFORE.path)
    result = rlkit("diagnose", "before", "--json")
    assert json.loads(result.stdout)["run"] == "first"
    assert result.stderr == (
        "before: the newest run of the trackio project, first; for the run of that name: runs/out/before\n"
    )
    assert rlkit("diagnose", "runs/out/before").stderr == ""


COMMANDS: list[Callable[[str], list[str]]] = [
    lambda name: ["run", name],
    lambda name: ["check", name],
    lambda name: ["predict", name],
    lambda name: ["plan", name],
    lambda name: ["chase", name],
    lambda name: ["proxy", "--replica", "http://127.0.0.1:1", "--recipe", name],
    lambda name: ["report", name],
    lambda name: ["compare", name],
    lambda name: ["diagnose", name],
    lambda name: ["advise", name],
    lambda name: ["watch", name],
    lambda name: ["stop", name],
    lambda name: ["cap", name, "5"],
    lambda name: ["calibrate", name],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command("x")[0])
def test_a_name_of_nothing_is_one_line_with_the_ways_out(command: Callable[[str], list[str]]) -> None:
    holding(BEFORE.path)
    result = rlkit(*command("befor"))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: befor: no ")
    assert f"no run of that name under {Path.cwd()}/runs/out" in line
    assert "did you mean before?" in line
    assert "a run's folder" in line
    assert "the name of a run under runs/out" in line
