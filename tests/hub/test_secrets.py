"""The scan that follows every test on the emulated Hub finds a token that shows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hub.conftest import assert_no_secret_shows
from hub.hub_server import EmulatedHub
from hub.stand_ins import leaks
from huggingface_hub import HfApi

pytestmark = pytest.mark.hub

TOKEN = "hf_anotherANOTHERanotherANOTHERanother"


def test_token_in_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text(f"GET / Authorization: Bearer {TOKEN}\n")
    with closing(sqlite3.connect(tmp_path / "local.db")) as database, database:
        database.execute("create table configs (config text)")
        database.execute("insert into configs values (?)", (f'{{"env": {{"HF_TOKEN": "{TOKEN}"}}}}',))
    (tmp_path / "clean.txt").write_text("hf_")
    assert sorted(Path(path).name for path in leaks(TOKEN, tmp_path)) == ["local.db", "trainer.log"]


@pytest.mark.parametrize("where", ["env", "labels", "command"])
def test_token_that_a_job_shows_is_found(api: HfApi, hub: EmulatedHub, tmp_path: Path, where: str) -> None:
    hub.faults.stuck_flavors.add("cpu-basic")
    shown: dict[str, dict[str, object]] = {
        "env": {"env": {"TOKEN": hub.token}}, "labels": {"labels": {"token": hub.token}},
        "command": {"command": ["echo", hub.token]},
    }  # fmt: skip
    job = api.run_job(**{"image": "python", "command": ["true"], "flavor": "cpu-basic", **shown[where]})  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        assert_no_secret_shows(hub, tmp_path)
    del hub.jobs[job.id]  # the scan after this test is not to find it


def test_token_in_a_log_is_found(api: HfApi, hub: EmulatedHub, tmp_path: Path) -> None:
    job = api.run_job(
        image="python", command=["sh", "-c", "echo $HF_TOKEN"], secrets={"HF_TOKEN": hub.token}, flavor="cpu-basic"
    )
    hub.until(lambda: hub.jobs[job.id].is_over)
    with pytest.raises(AssertionError):
        assert_no_secret_shows(hub, tmp_path)
    del hub.jobs[job.id]
