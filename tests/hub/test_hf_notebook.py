"""The published smoke run from the notebook that launches: 20 steps, two replicas, prices asked, everything cancelled.

The Jobs' image is an emulated one: its vLLM is the emulated replica, and its `accelerate launch` simulates the
trainer's steps and publishes their adapters.
"""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import papermill
import pytest
from hub.emulated_image import IMAGE
from hub.hub_server import EmulatedHub
from hub.job_table import arguments_of, asked_for
from hub.stand_ins import assert_nothing_is_lost
from huggingface_hub._jobs_api import _create_job_spec

from rlkit.engines.hf_jobs import Place, direct_url, network_group_of
from rlkit.engines.hf_wheel import pack_wheel, wheel_path
from rlkit.engines.state import read_state
from rlkit.recipe import load_recipe
from rlkit.results import read_run
from rlkit.run_folder import RunFolder

pytestmark = [pytest.mark.hub, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "runs" / "published" / "r1-dp2.yaml"
MAX_STEPS = 20
CHANGES = [f"train.steps={MAX_STEPS}", "hardware.deadline_hours=2"]


def test_smoke_run_from_the_notebook(hub: EmulatedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    hub.image |= IMAGE
    wheel = wheel_path(*pack_wheel())
    folder, page = RunFolder(tmp_path / "smoke"), tmp_path / "01_launch.ipynb"
    papermill.execute_notebook(
        str(ROOT / "notebooks" / "01_launch.ipynb"),
        str(page),
        parameters={"recipe": str(SMOKE), "overrides": CHANGES, "folder": str(folder.path), "dry_run": False},
        cwd=str(ROOT / "notebooks"),
        progress_bar=False,
    )
    # Everything is cancelled, and the run is here.
    assert_nothing_is_lost(hub, folder)
    assert [job.stage for job in hub.of_role("replica")] == ["CANCELED", "CANCELED"]
    assert [job.stage for job in hub.of_role("trainer")] == ["COMPLETED"]
    assert read_state(folder)["status"] == "finished"
    logged, _ = read_run(folder)
    assert list(logged.frame.index) == list(range(1, MAX_STEPS + 1))
    # The published run's first step is trainer-bound, and so are its simulated ones.
    assert json.loads(folder.verdict.read_text())["bound"] == "trainer"
    said = "".join(str(cell.get("outputs", "")) for cell in nbformat.read(page, as_version=4).cells)
    assert "$20.00 an hour" in said
    assert json.loads(folder.verdict.read_text())["headline"] in said

    # What was asked for equals the table field by field, and is made of huggingface_hub's own arguments.
    sent = [request.body for request in hub.requests if (request.method, request.path) == ("POST", "/api/jobs/tester")]
    launch = sent[0]["labels"]["launch"]
    place = Place("tester", "rlkit", wheel, "smoke", launch, network_group_of(load_recipe(SMOKE), launch))
    urls = [direct_url(index, 8000) for index in range(2)]
    assert sent == [asked_for(place, hub.token, replica, urls, 7200) for replica in (0, 1, None)]
    for body in sent:
        assert _create_job_spec(**arguments_of(body)) == body
