"""Which checkpoint a run resumes from."""

from pathlib import Path

import pytest

from rlkit.engines.checkpoint import checkpoint_step, claim_folder, newest_checkpoint
from rlkit.errors import BadInput
from rlkit.recipe import load_recipe
from rlkit.run_folder import RunFolder

LOCAL = Path(__file__).parents[2] / "runs" / "local.yaml"


def make(folder: Path, name: str, state: str | None) -> Path:
    (folder / name).mkdir()
    if state is not None:
        (folder / name / "trainer_state.json").write_text(state)
    return folder / name


def test_the_newest_complete_one_wins(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint-9", "{}")
    whole = make(tmp_path, "checkpoint-10", "{}")
    make(tmp_path, "checkpoint-20", None)
    make(tmp_path, "checkpoint-30", '{"global_st')
    make(tmp_path, "checkpoint-final", "{}")
    assert newest_checkpoint(tmp_path) == whole
    assert checkpoint_step(whole) == 10


def test_the_newest_one_before_a_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path, f"checkpoint-{step}", "{}")
    assert newest_checkpoint(tmp_path, before=30) == tmp_path / "checkpoint-20"
    assert newest_checkpoint(tmp_path, before=10) is None


def test_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint-5", None)
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None


def test_a_run_lost_after_its_last_step_takes_no_further_one(tmp_path: Path) -> None:
    recipe, folder = load_recipe(LOCAL, ["train.steps=3"]), RunFolder(tmp_path)
    folder.shared.mkdir()
    for step in (2, 3):
        make(folder.shared, f"checkpoint-{step}", "{}")
    folder.recipe.write_text(recipe.to_yaml())
    assert claim_folder(recipe, folder) == folder.shared / "checkpoint-2"
    assert claim_folder(recipe.with_overrides(["train.steps=4"]), folder) == folder.shared / "checkpoint-3"
    with pytest.raises(BadInput, match=r"a run past step 1 \(checkpoint-3\)"):
        claim_folder(recipe.with_overrides(["train.steps=1"]), folder)


def test_a_finished_run_says_whether_more_steps_would_go_on(tmp_path: Path) -> None:
    recipe, folder = load_recipe(LOCAL, ["train.steps=3"]), RunFolder(tmp_path)
    folder.shared.mkdir()
    folder.recipe.write_text(recipe.to_yaml())
    folder.state.write_text('{"status": "finished"}')
    with pytest.raises(BadInput, match=r"without a checkpoint to go on from; choose another --name$"):
        claim_folder(recipe.with_overrides(["train.steps=4"]), folder)
    make(folder.shared, "checkpoint-3", "{}")
    with pytest.raises(BadInput, match=r"raise train\.steps to go on"):
        claim_folder(recipe, folder)
    assert claim_folder(recipe.with_overrides(["train.steps=4"]), folder) == folder.shared / "checkpoint-3"
