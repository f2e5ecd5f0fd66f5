"""`rlkit compare` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import log_run, run_folder
from typer.testing import CliRunner, Result

from rlkit.cli import app
from rlkit.compare_cli import PAGE
from rlkit.errors import BadInput
from rlkit.notebook_parameters import declared_parameters
from rlkit.past_run import open_past_runs


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def compared(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments])


def test_runs_by_folder_by_name_and_from_trackio_stand_beside_each_other() -> None:
    run_folder(Path("first"))
    run_folder(Path("runs/out/second"), "learning-run")
    log_run("learning-run", "third")
    result = compared("first", "second", "recorded/third")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("3 runs: ")
    assert lines[0].endswith("what bounded them: trainer, generation, generation.")
    assert lines[1].split() == ["first", "second", "third"]
    verdict = next(line for line in lines if line.lstrip().startswith("Verdict"))
    assert verdict.split()[1:] == ["trainer-bound", "generation-bound", "generation-bound"]
    routed = next(line for line in lines if line.lstrip().startswith("Rollouts routed"))
    assert routed.split("  ")[-1].strip() == "no counters"  # only a folder has the proxy's counters
    assert "6,040" in routed


def test_json_has_numbers_and_null_where_there_is_none() -> None:
    run_folder(Path("first"))
    log_run("learning-run", "third")
    told = json.loads(compared("first", "recorded/third", "--json").stdout)
    assert [run["run"] for run in told["runs"]] == ["first", "third"]
    assert told["runs"][0]["change"] is None
    assert told["runs"][1]["change"] == "none"
    assert told["runs"][1]["usd"] is None
    assert told["weight_syncs"][0]["attempts_3"] == 1
    assert told["routing"][1]["routed"] is None


def test_the_page_is_the_notebook_of_the_same_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[tuple[object, ...]] = []
    monkeypatch.setattr("rlkit.report.render_notebook", lambda *given, title: rendered.append(given))
    run_folder(Path("runs/out/first"))
    log_run("learning-run", "third")
    result = compared("first", "recorded/third", "--out", "page.html")
    assert result.output.splitlines()[-1] == "Page: page.html"
    ((notebook, values, out),) = rendered
    assert notebook == PAGE
    assert PAGE.is_file()
    # By its folder: the notebook runs in another place.
    assert values == {"runs": ["runs/out/first", "recorded/third"], "source": ""}
    assert out == Path("page.html")
    assert set(declared_parameters(PAGE)) >= {"runs", "source"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["nowhere"],
            "/runs/out; give a run's folder, the name of a run under runs/out, or PROJECT/RUN in trackio",
        ),
        (["./nowhere"], "./nowhere: no such run"),
        (["recorded/none"], "recorded/none: not a run's folder; as PROJECT/RUN: trackio project 'recorded' has no run"),
        (["first", "first"], "first: given twice"),
        (["first", "--out", "page.txt"], "--out page.txt: name an HTML file"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    run_folder(Path("first"))
    result = compared(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_two_runs_of_one_name_are_called_as_they_were_given() -> None:
    run_folder(Path("a/same"))
    run_folder(Path("b/same"))
    assert list(open_past_runs(["a/same", "b/same"])) == ["a/same", "b/same"]
    with pytest.raises(BadInput, match="a/same: given twice"):
        open_past_runs(["a/same", "a/same"])
