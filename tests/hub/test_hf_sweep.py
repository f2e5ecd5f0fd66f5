"""A sweep whose points are rented: several at once up to its limit, within one total, each in a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub.emulated_image import IMAGE
from hub.hub_server import EmulatedHub
from hub.stand_ins import assert_nothing_is_lost

from rlkit.sweep import plan_sweep
from rlkit.sweep_folder import SweepFolder
from rlkit.sweep_run import run_sweep

pytestmark = [pytest.mark.hub, pytest.mark.slow]

RUNS = Path(__file__).parents[2] / "runs" / "published"
STEPS = 10


def test_rented_points_run_up_to_the_limit_and_within_the_total(
    hub: EmulatedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of $4 fit into $10 only because two at once spend little; one that may take $11 never starts."""
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    hub.image |= IMAGE
    budgets = [4.0, 4.0, 4.0, 11.0]
    points = [{"train.seed": seed, "hardware.budget_usd": usd} for seed, usd in enumerate(budgets)]
    asked = {"recipe": "r1-dp2.yaml", "steps": STEPS, "points": points, "limits": {"usd": 10.0, "jobs": 2}}
    sweep, folder = plan_sweep(asked, RUNS), SweepFolder(tmp_path / "out")
    found = run_sweep(sweep, folder.path)
    ended = [found[point.key] for point in sweep.points]
    assert [one.status for one in ended] == ["done", "done", "done", "skipped"], [one.error for one in ended]
    assert str(ended[-1].error).startswith("limits.usd: $9.")
    assert str(ended[-1].error).endswith(" of $10.00 is left and this run may take $11.00")
    assert all(0 < one.spent_usd < 4.0 for one in ended[:3])
    assert all(one.summary is not None and one.summary.steps == STEPS for one in ended[:3])
    assert len(hub.of_role("trainer")) == 3
    assert _most_at_once(hub) == 2
    for point in sweep.points[:3]:
        assert_nothing_is_lost(hub, folder.run(point))


def _most_at_once(hub: EmulatedHub) -> int:
    """Runs of which a Job was alive at the same time."""
    spans = []
    for run in {job.labels["run"] for job in hub.jobs.values()}:
        jobs = [job for job in hub.jobs.values() if job.labels["run"] == run]
        spans.append((min(job.created for job in jobs), max(job.finished or 0.0 for job in jobs)))
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    going = most = 0
    for _, change in changes:
        going += change
        most = max(most, going)
    return most
