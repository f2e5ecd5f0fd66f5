"""Which checkpoint a run resumes from."""

from pathlib import Path

from rlkit.engines.checkpoint import checkpoint_step, newest_checkpoint


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


def test_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint-5", None)
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
