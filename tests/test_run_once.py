"""A run that is made once: what has finished is read from its folder, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_runs import recipe
from run_folders import run_folder

from rlkit import run_once as module
from rlkit.results import write_results
from rlkit.run_once import run_once


def test_a_finished_run_is_read_from_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    verdict = write_results(recipe(), folder, report=False)
    folder.state.write_text(json.dumps({"status": "finished"}))
    monkeypatch.setattr(module, "launch", lambda *_, **__: pytest.fail("it was launched again"))
    before = folder.metrics.stat().st_mtime_ns
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "elsewhere"))  # a folder that was brought here from elsewhere
    assert run_once(recipe(), folder, lambda event: None) == verdict
    assert folder.metrics.stat().st_mtime_ns == before


def test_one_that_was_killed_before_its_results_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    folder.metrics.unlink()
    folder.state.write_text(json.dumps({"status": "finished"}))
    monkeypatch.setattr(module, "launch", lambda *_, **__: pytest.fail("it was launched again"))
    assert run_once(recipe(), folder, lambda event: None).bound == "trainer"
    assert folder.metrics.is_file()
    assert folder.verdict.is_file()
