"""A chase whose runs are rented: the second with the first's advice, within one total, each with its results here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hub.emulated_image import IMAGE
from hub.hub_server import EmulatedHub
from hub.stand_ins import assert_nothing_is_lost
from typer.testing import CliRunner

from rlkit import advice, cli, machine
from rlkit.chase_folder import ChaseFolder
from rlkit.engines import hf
from rlkit.engines.state import read_state
from rlkit.recipe import load_recipe
from rlkit.results import read_run

pytestmark = [pytest.mark.hub, pytest.mark.slow]

START = Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml"
BUDGET_USD = 4.0
STEPS = 15


def chased(*words: str) -> str:
    """What the command says when nobody is there to be asked."""
    budget = f"hardware.budget_usd={BUDGET_USD}"
    command = ["chase", str(START), "--yes", "--steps", str(STEPS), "--set", budget, *words]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    return result.output


def test_two_rented_runs_the_second_with_the_advice_of_the_first(
    hub: EmulatedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr(advice, "ADVISED_STEPS", 12)
    monkeypatch.setattr(machine, "cores", lambda: 1)  # starting processes takes longer than so few steps
    monkeypatch.setattr(hf, "launch_hf", partial(hf.launch_hf, options=hf.HfOptions(poll_s=0.05)))
    monkeypatch.chdir(tmp_path)
    hub.image |= IMAGE
    said = chased("--max-runs", "2", "--spend-usd", "6")
    place = ChaseFolder(Path("runs/out/chase-r1-dp2"))
    board = place.load()
    assert board is not None
    first, second = board.probes
    assert (board.engine, board.best, second.parent) == ("hf", second, 1)
    assert board.stopped.startswith("--max-runs 2 are made")
    assert f"Best: {place.recipe(second)}" in said

    # The second is the first with what its advice says, whole in the chase's folder and short in the bucket.
    assert second.overrides == first.advice[0].overrides
    start, changed = load_recipe(place.recipe(first)), load_recipe(place.recipe(second))
    assert changed == start.with_overrides([*second.overrides, f"name={changed.name}"])
    for probe, recipe in ((first, start), (second, changed)):
        delivered = load_recipe(hub.buckets.folder("tester/rlkit") / "runs" / probe.folder / "recipe.yaml")
        assert delivered == recipe.with_overrides([f"train.steps={STEPS}"])
        # Its Jobs have ended, and what they made is here and is what the scoreboard says.
        run = place.run(probe.number)
        assert_nothing_is_lost(hub, run)
        assert run.verdict.exists()
        assert probe.bound
        logged, _ = read_run(run)
        assert list(logged.frame.index) == list(range(1, STEPS + 1))
        billed = read_state(run)["usd"]
        assert 0 < billed < BUDGET_USD
        assert probe.usd == billed
    stages = {role: [job.stage for job in hub.of_role(role)] for role in ("trainer", "replica")}
    assert stages == {"trainer": ["COMPLETED"] * 2, "replica": ["CANCELED"] * 4}

    # What the two were billed counts when the chase goes on: one more may cost more than is left.
    said = chased("--max-runs", "3", "--spend-usd", str(BUDGET_USD))
    assert "Ended: --spend-usd: $3." in said
    assert "of $4.00 is left and this run may take $4.00" in said
    assert len(hub.of_role("trainer")) == 2
