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
VLLM = """
import sys
from rlkit.serving import emulated
given = sys.argv
sys.argv = ["vllm", *given[(port := given.index("--port")) : port + 2]]
emulated.main()
"""
ACCELERATE = """
import argparse, json, pathlib, httpx, numpy
from safetensors.numpy import save_file
from rlkit.engines.sim import launch_sim
from rlkit.recipe import load_recipe
from rlkit.run_folder import RunFolder
parser = argparse.ArgumentParser()
for name in ("folder", "server-url", "shared"):
    parser.add_argument("--" + name, required=True)
options, _ = parser.parse_known_args()
folder = pathlib.Path(options.folder)
recipe = load_recipe(folder / "recipe.yaml")
def post(path, **body):
    httpx.post(options.server_url + path, json=body, timeout=60).raise_for_status()
for version in range(1, 1 + recipe.train.steps // recipe.rollout.weight_sync_steps):
    policy = pathlib.Path(options.shared, ".vllm_lora", "trl-policy-v%d" % version)
    policy.mkdir(parents=True)
    config = {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (policy / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora_A": numpy.full(4, version, numpy.float32)}, policy / "adapter_model.safetensors")
    post("/v1/load_lora_adapter", lora_name=policy.name, lora_path=str(policy))
    for prompt in range(16):
        post("/v1/completions", model=policy.name, prompt=[prompt] * 200, max_tokens=4)
launch_sim(recipe, RunFolder(folder), lambda event: print(event.kind, event.step, event.text, flush=True))
RunFolder(folder).state.unlink()  # a trainer has none
"""
IMAGE = {
    **dict.fromkeys(["vllm/__init__.py", "vllm/entrypoints/__init__.py", "vllm/entrypoints/openai/__init__.py"], ""),
    "vllm/entrypoints/openai/api_server.py": VLLM,
    **dict.fromkeys(["accelerate/__init__.py", "accelerate/commands/__init__.py"], ""),
    "accelerate/commands/launch.py": ACCELERATE,
}


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
