"""The smoke run in Jobs that do the real work: two vLLM servers on CPUs, TRL's trainer, and the proxy.

Only the Hub and the machines are emulated. Model and steps are tiny.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import HfApi

from rlkit.engines.base import Event
from rlkit.engines.hf import HfOptions, launch_hf
from rlkit.engines.state import read_state
from rlkit.recipe import load_recipe
from rlkit.results import read_run, write_results
from rlkit.run_folder import RunFolder

pytestmark = [pytest.mark.hub, pytest.mark.slow, pytest.mark.long]

RUNS = Path(__file__).parents[2] / "runs"
STEPS = 20  # the published smoke run's
# A step's mean ratio of probabilities: 1 but for rounding and a few versions' staleness, up to 0.04 off on few tokens.
SAME_POLICY = 0.1
CHANGES = [
    *("engine=hf", f"train.steps={STEPS}", "serve.replicas=2", "hardware.trainer=h200x2", "hardware.replica=h200"),
    *("sampling.max_completion_length=32", "train.gradient_accumulation_steps=8", "train.save_steps=10"),
    *("serve.max_model_len=128", "serve.max_num_seqs=32", "serve.max_num_batched_tokens=4096"),
    *("rollout.max_inflight_tasks=16", "rollout.queue_maxsize=32", "hardware.deadline_hours=1"),
]


def test_real_trainer_and_real_replicas_in_jobs(
    api: HfApi, hub: EmulatedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    recipe = load_recipe(RUNS / "ablation-cap" / "fixed-kept.yaml", CHANGES)
    folder, events = RunFolder(tmp_path / "smoke"), list[Event]()
    outcome = launch_hf(recipe, folder, events.append, options=HfOptions(api=api, poll_s=0.5))
    assert outcome.steps == STEPS
    assert [event.step for event in events if event.kind == "step"] == list(range(1, STEPS + 1))
    assert not hub.running()
    assert [job.stage for job in hub.of_role("replica")] == ["CANCELED", "CANCELED"]
    assert read_state(folder)["status"] == "finished"
    logged, _ = read_run(folder)
    assert list(logged.frame.index) == list(range(1, STEPS + 1))
    # The servers sampled from what the trainer trains: their adapters are its own, through bucket and proxy.
    assert logged.frame["ratio"].sub(1).abs().max() < SAME_POLICY
    adapters = json.loads(folder.proxy.read_text())["adapters"]
    assert [adapter["name"] for adapter in adapters] == [f"trl-policy-v{number}" for number in range(1, STEPS + 2)]
    assert all(adapter["ok"] and adapter["accepted_by"] == 2 for adapter in adapters)
    assert write_results(recipe, folder).headline
    assert folder.report.stat().st_size > 100_000
