"""A run read back from its folder and from trackio."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from recorded_runs import recipe
from run_folders import EVALUATION, PROXY, VERSIONS, log_run, run_folder

from rlkit.errors import BadInput
from rlkit.past_run import open_past_run


def test_a_folder_gives_everything_a_report_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "first")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "elsewhere"))  # the folder is enough
    past = open_past_run(str(folder.path), project="ignored")
    assert (past.name, past.project) == ("first", "recorded")
    assert past.recipe == recipe()
    assert (past.versions, past.proxy, past.evaluation) == (VERSIONS, PROXY, EVALUATION)
    assert past.limits == {"queue_maxsize": 256}
    assert past.verdict.bound == "trainer"
    assert list(past.commands) == [
        f"rlkit run {folder.recipe}",
        f"rlkit diagnose {folder.path}",
        f"rlkit report {folder.path}",
    ]


def test_facts_name_the_run_its_length_and_its_start(tmp_path: Path) -> None:
    past = open_past_run(str(run_folder(tmp_path / "first").path))
    assert past.facts == {
        "run": "first",
        "project": "recorded",
        "steps": "14 of 50 in 46 s",
        "started": "2026-01-05 12:00 UTC",
    }


def test_a_part_of_a_run_is_called_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "first")
    folder.recipe.write_text(recipe().with_overrides(["train.steps=100"]).to_yaml())
    folder.state.write_text('{"status": "stopped"}')
    assert open_past_run(str(folder.path)).facts["steps"] == "14 of 100 (it was stopped) in 46 s"


def test_a_part_of_a_run_that_logged_seldom_is_told_by_its_last_step(tmp_path: Path) -> None:
    past = open_past_run(str(run_folder(tmp_path / "first").path))
    assert replace(past, frame=past.frame.loc[[5, 10]]).facts["steps"].startswith("10 of 50 in ")


def test_a_folder_without_counters_and_evaluation_is_read_all_the_same(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "first")
    folder.proxy.unlink()
    folder.evaluation.unlink()
    past = open_past_run(str(folder.path))
    assert (past.proxy, past.evaluation) == ({}, {})


def test_broken_counters_are_told_by_their_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "first")
    folder.proxy.write_text("{")
    with pytest.raises(BadInput, match=r"proxy\.json: broken JSON"):
        open_past_run(str(folder.path))


def test_a_trackio_run_is_read_by_name_or_else_the_newest() -> None:
    log_run("trainer-bound-run", "first")
    log_run("learning-run", "second")
    assert open_past_run(project="recorded", name="first").verdict.bound == "trainer"
    newest = open_past_run(project="recorded")
    assert newest.verdict.bound == "generation"
    assert newest.proxy == {}
    assert "rlkit diagnose recorded --run second" in newest.commands
    pd.testing.assert_frame_equal(newest.frame, open_past_run(project="recorded", name="second").frame)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "both empty"),
        ({"folder": "nowhere"}, "nowhere: not a run folder"),
        ({"project": "nothing"}, "nothing"),
    ],
)
def test_what_is_not_there_is_one_line(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message) as failure:
        open_past_run(**arguments)
    assert "\n" not in str(failure.value)
