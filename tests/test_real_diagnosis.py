"""Real runs of this machine that are lopsided on purpose, each diagnosed as what it is, from its trackio run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[1]
# One replica and few steps: what bounds them shows in the first that are past the warm-up.
SHORT = ("--set", "train.steps=10", "--set", "train.save_steps=10", "--set", "serve.replicas=1", "--no-report")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One trackio and one model cache for the module, so that a toy model is built once."""
    home = tmp_path_factory.mktemp("home")
    return {**os.environ, "TRACKIO_DIR": str(home / "trackio"), "RLKIT_CACHE": str(home / "cache")}


@pytest.mark.parametrize(
    ("recipe", "side", "cause"),
    [
        ("local-trainer-bound", "trainer", "tiny-rows"),
        ("local-generation-bound", "generation", "client-limit"),
        ("local-client-limit", "generation", "client-limit"),
        ("ablation-cap/fixed-cleared", "generation", "over-admission"),
    ],
)
def test_a_lopsided_run_is_diagnosed_from_trackio(
    recipe: str, side: str, cause: str, environment: dict[str, str], tmp_path: Path
) -> None:
    name, project = Path(recipe).name, f"real-{Path(recipe).name}"
    run = ("run", ROOT / "runs" / f"{recipe}.yaml", "--folder", tmp_path / name, "--set", f"tracking.project={project}")
    for arguments in ((*run, *SHORT), ("diagnose", project, "--json")):
        done = subprocess.run(
            [sys.executable, "-m", "rlkit", *map(str, arguments)],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert verdict["bound"] == side, verdict["headline"]
    assert verdict["causes"][0]["name"] == cause, verdict["cause"]
