"""One engine per run folder."""

from pathlib import Path

import pytest

from rlkit.engines.lock import RunLock
from rlkit.engines.state import read_state
from rlkit.errors import BadInput
from rlkit.run_folder import RunFolder


def test_a_folder_in_use_is_refused_and_free_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with RunLock(folder) as lock:
        lock.note("running")
        with pytest.raises(BadInput, match="a run is going on here"), RunLock(folder):
            pass
    with RunLock(folder) as lock:
        lock.note("finished", steps=3)
    state = read_state(folder)
    assert (state["status"], state["steps"]) == ("finished", 3)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot make the run folder"), RunLock(RunFolder(tmp_path / "file" / "run")):
        pass
