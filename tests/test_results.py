from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_runs import recipe as recorded_recipe
from recorded_runs import recorded

from rlkit.errors import BadInput
from rlkit.results import keep_metrics, logged_names, read_run, write_results
from rlkit.run_folder import RunFolder
from rlkit.tracking import load_frame, write_run

RECIPE = recorded_recipe()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with a recipe, whose run trackio does not know yet."""
    folder = RunFolder(tmp_path / "mine")
    folder.path.mkdir()
    folder.recipe.write_text(RECIPE.to_yaml())
    return folder


def log(steps: int) -> None:
    frame = recorded("trainer-bound-run").head(steps).drop(columns="timestamp").reset_index().astype(float)
    rows = [{str(key): value for key, value in row.items() if value == value} for row in frame.to_dict("records")]
    write_run(RECIPE.tracking.project, "mine", rows, config={"recipe": RECIPE.to_dict()})


def test_results_are_the_metrics_and_the_verdict(folder: RunFolder) -> None:
    log(14)
    verdict = write_results(RECIPE, folder, report=False)
    assert json.loads(folder.verdict.read_text()) == verdict.model_dump(mode="json")
    assert verdict.bound == "trainer"
    run = load_frame(folder.metrics)
    assert (run.name, len(run.frame), run.recipe) == ("mine", 14, RECIPE)
    assert not folder.report.exists()


def test_a_run_that_trackio_does_not_know_has_no_results(folder: RunFolder) -> None:
    with pytest.raises(BadInput, match="recorded"):
        write_results(RECIPE, folder, report=False)
    assert keep_metrics(RECIPE, folder) is False
    assert not folder.metrics.exists()


def test_what_an_interrupted_run_logged_is_kept(folder: RunFolder) -> None:
    log(2)
    assert keep_metrics(RECIPE, folder) is True
    assert len(load_frame(folder.metrics).frame) == 2


def test_a_rented_run_that_goes_on_has_the_steps_its_trainer_said(folder: RunFolder) -> None:
    rented = RECIPE.with_overrides(["engine=hf", "hardware.trainer=h200", "hardware.replica=h200"])
    folder.recipe.write_text(rented.to_yaml())
    with pytest.raises(BadInput, match="the run has no step yet"):
        read_run(folder)
    folder.steps.write_text('{"global_step": 1, "rew')
    with pytest.raises(BadInput, match="the run has no step yet"):
        read_run(folder)
    folder.steps.write_text('{"global_step": 1, "reward": 0.5}\n{"global_step": 2, "rew')
    run, recipe = read_run(folder)
    assert (run.project, run.name, run.recipe) == (rented.tracking.project, "mine", recipe)
    assert run.frame["reward"].to_dict() == {1: 0.5}


def test_steps_that_trackio_lost_are_taken_from_the_trainers_own_lines(folder: RunFolder) -> None:
    frame = recorded("trainer-bound-run").head(6).drop(columns="timestamp").reset_index().astype(float)
    rows = [{str(key): value for key, value in row.items() if value == value} for row in frame.to_dict("records")]
    kept = [row for row in rows if row["global_step"] != 4]
    write_run(RECIPE.tracking.project, "mine", kept, config={"recipe": RECIPE.to_dict()})
    lines = [json.dumps({**row, "kl": None}) for row in rows]
    folder.steps.write_text("\n".join([*lines, lines[-1][:20]]) + "\n")
    assert keep_metrics(RECIPE, folder)
    saved = load_frame(folder.metrics).frame
    assert list(saved.index) == [1, 2, 3, 4, 5, 6]
    assert saved.loc[4, "perf/step_s"] == rows[3]["perf/step_s"]
    assert saved["timestamp"].is_monotonic_increasing


def test_a_run_is_read_from_its_folder_and_else_from_trackio(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(3)
    run, recipe = read_run(folder)
    assert (len(run.frame), recipe) == (3, RECIPE)
    keep_metrics(RECIPE, folder)
    monkeypatch.setenv("TRACKIO_DIR", "/nowhere")
    assert len(read_run(folder)[0].frame) == 3


def test_a_run_that_goes_on_is_not_read_from_what_its_interruption_saved(folder: RunFolder) -> None:
    log(2)
    keep_metrics(RECIPE, folder)
    log(5)
    folder.state.write_text(json.dumps({"status": "running"}))
    assert len(read_run(folder)[0].frame) == 5
    folder.state.write_text(json.dumps({"status": "failed"}))
    assert len(read_run(folder)[0].frame) == 2


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "it was not started"),
        (
            {"status": "failed", "error": "replica-0 exited with code 1; its last log lines:\nno memory"},
            "it failed: rep",
        ),
        ({"status": "stopped"}, "it was stopped"),
    ],
)
def test_a_run_without_a_step_is_told_as_that(folder: RunFolder, state: dict[str, str], words: str) -> None:
    folder.state.write_text(json.dumps(state))
    for project_exists in (False, True):
        if project_exists:
            write_run(RECIPE.tracking.project, "another", [{"global_step": 1.0, "reward": 0.5}])
        with pytest.raises(BadInput) as error:
            read_run(folder)
        assert str(error.value).startswith(f"{folder.path}: the run has no step yet; {words}")


def test_a_run_whose_steps_are_elsewhere_is_told_where_they_were_looked_for(folder: RunFolder) -> None:
    folder.steps.write_text('{"global_step": 1}\n')
    with pytest.raises(BadInput, match="trackio project 'recorded' does not exist in"):
        read_run(folder)


def test_names_that_are_taken() -> None:
    assert logged_names(RECIPE) == set()
    log(2)
    assert logged_names(RECIPE) == {"mine"}


def test_names_that_cannot_be_read_are_not_taken_for_free_ones(tmp_path: Path) -> None:
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio" / f"{RECIPE.tracking.project}.db").write_text("not a database" * 100)
    with pytest.raises(BadInput, match="not a trackio database"):
        logged_names(RECIPE)


def test_a_space_that_is_not_there_yet_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(project: str, source: str) -> None:
        raise BadInput(f"source {source}: no trackio server answers there")

    monkeypatch.setattr("rlkit.tracking.list_runs", nobody)
    assert logged_names(RECIPE.with_overrides(["tracking.space_id=me/space"])) == set()


def test_a_run_in_the_current_folder_has_its_name(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    log(3)
    monkeypatch.chdir(folder.path)
    run, _ = read_run(RunFolder(Path(".")))
    assert (run.name, len(run.frame)) == ("mine", 3)


def test_a_run_in_a_space_is_read_from_there(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    log(3)
    elsewhere = folder.path.parent / "space"
    (folder.path.parent / "trackio").rename(elsewhere)
    recipe = RECIPE.with_overrides([f"tracking.space_id={elsewhere}"])
    folder.recipe.write_text(recipe.to_yaml())
    assert len(read_run(folder)[0].frame) == 3


def test_a_folder_without_a_recipe_is_not_a_runs(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not a run folder, it has no recipe\.yaml"):
        read_run(RunFolder(tmp_path))
