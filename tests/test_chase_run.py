from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlkit import advice, chase_run, cli, machine, run_once
from rlkit.chase import Probe, Rules, Scoreboard
from rlkit.chase_folder import ChaseFolder
from rlkit.chase_run import chase
from rlkit.engines import launch, sim
from rlkit.errors import BadInput, RunFailed
from rlkit.recipe import Recipe, load_recipe, recipe_diff
from rlkit.simulation.constants import Physics
from rlkit.simulation.prediction import predict
from rlkit.simulation.recipes import translate

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs"


def board(recipe: Recipe, steps: int, rules: Rules | None = None) -> Scoreboard:
    return Scoreboard("chase-it", recipe.name, "sim", recipe.train.steps, steps, rules or Rules())


def toy(*overrides: str) -> Recipe:
    return load_recipe(RUNS / "local-generation-bound.yaml", ["engine=sim", *overrides])


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "ADVISED_STEPS", 12)
    monkeypatch.setattr(machine, "cores", lambda: 1)  # starting processes takes longer than so few steps


@pytest.mark.usefixtures("few_steps")
def test_a_chase_on_small_runs_improves_and_leaves_its_chain_behind(tmp_path: Path) -> None:
    place = ChaseFolder(tmp_path / "chase-it")
    done = chase(board(toy(), 15, Rules(max_runs=2)), toy(), place, processes=1)
    first, second = done.probes
    assert first.bound == "generation"
    assert first.figures is not None
    assert second.figures is not None
    assert second.figures.wall_clock_min < 0.9 * first.figures.wall_clock_min
    assert second.predicted is not None
    assert second.predicted.wall_clock_min == pytest.approx(second.figures.wall_clock_min, rel=0.15)
    assert "--max-runs 2" in done.stopped or "less than 5%" in done.stopped
    assert place.load() == done
    new = load_recipe(place.recipe(second))
    assert {name for name, _, _ in recipe_diff(toy(), new)} == {
        override.partition("=")[0] for override in second.overrides
    }
    assert new.train.steps == toy().train.steps
    assert (place.run(2).verdict).exists()


@pytest.mark.usefixtures("few_steps")
def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ChaseFolder(tmp_path / "chase-it")
    launched: list[str] = []
    really = launch

    def counted(recipe: Recipe, folder: Any, *rest: Any, **options: Any) -> Any:
        launched.append(folder.name)
        return really(recipe, folder, *rest, **options)

    monkeypatch.setattr(run_once, "launch", counted)

    def stop(probe: Probe) -> None:
        raise KeyboardInterrupt

    # Stopped between the first run's end and its place on the scoreboard, then after it.
    with monkeypatch.context() as patched:
        patched.setattr(chase_run, "advise", lambda *given: stop(Probe(0, "", "")))
        with pytest.raises(KeyboardInterrupt):
            chase(board(toy(), 15), toy(), place, processes=1)
    with pytest.raises(KeyboardInterrupt):
        chase(board(toy(), 15), toy(), place, after=stop, processes=1)
    kept = place.load()
    assert kept is not None
    done = chase(replace(kept, rules=Rules(max_runs=2)), toy(), place, processes=1)
    assert len(done.probes) == 2
    assert launched == ["chase-it-1", "chase-it-2"]
    assert chase(done, toy(), place, processes=1) == done


@pytest.mark.usefixtures("few_steps")
def test_a_change_that_cannot_run_is_noted_and_another_one_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = launch

    def second_fails(recipe: Recipe, folder: Any, *rest: Any, **options: Any) -> Any:
        if folder.name.endswith("-2"):
            raise RunFailed("trainer: CUDA out of memory\nmore lines")
        return really(recipe, folder, *rest, **options)

    monkeypatch.setattr(run_once, "launch", second_fails)
    start = published("r1-dp2")
    done = chase(board(start, 15, Rules(max_runs=3)), start, ChaseFolder(tmp_path / "chase-it"), processes=1)
    assert done.probes[1].failure == "trainer: CUDA out of memory"
    assert done.probes[2].overrides != done.probes[1].overrides
    assert done.probes[2].parent == 1
    assert done.best == done.probes[2]


def test_a_first_run_that_cannot_be_ends_in_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **options: Any) -> Any:
        raise BadInput("hardware.trainer: no such flavor")

    monkeypatch.setattr(run_once, "launch", fails)
    with pytest.raises(BadInput, match="no such flavor"):
        chase(board(toy(), 15), toy(), ChaseFolder(tmp_path / "chase-it"), processes=1)


@pytest.mark.usefixtures("few_steps")
def test_a_run_that_is_not_agreed_to_ends_the_chase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, asked = launch, list[object]()

    def rented(recipe: Recipe, folder: Any, on_event: Any, confirm: Any) -> Any:
        if not confirm("2 USD"):
            raise BadInput("not started: it costs 2 USD")
        return really(recipe, folder, on_event)

    def agree_once(price: object) -> bool:
        asked.append(price)
        if len(asked) == 3:
            raise BadInput("--yes: not started, nobody is there to be asked")
        return len(asked) < 2

    monkeypatch.setattr(run_once, "launch", rented)
    place = ChaseFolder(tmp_path / "chase-it")
    for _ in range(2):
        with pytest.raises(BadInput, match="not started"):
            chase(place.load() or board(toy(), 15), toy(), place, confirm=agree_once, processes=1)
        kept = place.load()
        assert kept is not None
        assert [one.number for one in kept.probes] == [1]
    assert asked == ["2 USD", "2 USD", "2 USD"]


@pytest.mark.usefixtures("few_steps")
def test_rented_runs_end_where_one_more_may_cost_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, launched = launch, list[str]()

    def rented(recipe: Recipe, folder: Any, *rest: Any, **options: Any) -> None:
        """Simulated, and billed $6 as its engine notes."""
        launched.append(folder.name)
        really(recipe.with_overrides(["engine=sim"]), folder, lambda event: None)
        folder.state.write_text(json.dumps(json.loads(folder.state.read_text()) | {"usd": 6.0}))

    monkeypatch.setattr("rlkit.run_once.launch", rented)
    recipe, place = toy("engine=hf", "hardware.budget_usd=10"), ChaseFolder(tmp_path / "chase-it")
    with pytest.raises(BadInput, match=r"--spend-usd: \$9.00 of \$9.00 is left and this run may take \$10.00"):
        chase(board(recipe, 15), recipe, place, processes=1, spend_usd=9.0)
    assert launched == []
    done = chase(board(recipe, 15, Rules(max_runs=2)), recipe, place, processes=1, spend_usd=15.0)
    assert launched == ["chase-it-1"]
    assert done.stopped == "--spend-usd: $9.00 of $15.00 is left and this run may take $10.00"
    # Taken up again with more, it knows what was spent.
    done = chase(done, recipe, place, processes=1, spend_usd=21.0)
    assert launched == ["chase-it-1", "chase-it-2"]
    assert "--spend-usd" not in done.stopped


def test_rented_runs_that_nobody_is_asked_about_need_a_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_once, "launch", None)  # nothing is started

    def refused(*words: str) -> str:
        recipe = str(RUNS / "published" / "r1-dp2.yaml")
        result = CliRunner().invoke(cli.app, ["chase", recipe, "--max-runs", "3", *words])
        assert result.exit_code == 2, result.output
        assert not (tmp_path / "runs").exists()
        return result.stderr

    no_total = "error: --spend-usd: missing, and with --yes up to 3 runs are on rented hardware (engine hf)\n"
    assert refused("--yes") == no_total
    assert refused("--yes", "--set", "hardware.budget_usd=9") == no_total
    no_budget = "error: hardware.budget_usd: not set, and r1-dp2 runs on engine hf\n"
    assert refused("--yes", "--spend-usd", "9") == no_budget
    assert refused("--spend-usd", "9") == no_budget


@pytest.mark.usefixtures("few_steps")
def test_a_total_asks_nothing_of_a_chase_that_costs_nothing(tmp_path: Path) -> None:
    place = ChaseFolder(tmp_path / "chase-it")
    done = chase(board(toy(), 15, Rules(max_runs=1)), toy(), place, processes=1, spend_usd=0.01)
    assert done.probes[0].figures is not None


@pytest.mark.usefixtures("few_steps")
def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(RUNS / "local-generation-bound.yaml")
    runner = CliRunner()

    def rlkit_(*words: str) -> Any:
        return runner.invoke(cli.app, list(words))

    chased = rlkit_("chase", recipe, "--engine", "sim", "--max-runs", "2", "--steps", "15")
    assert chased.exit_code == 0, chased.output
    assert "Best: runs/out/chase-local-generation-bound/2-inflight-" in chased.output
    again = rlkit_("chase", recipe, "--engine", "sim", "--max-runs", "2", "--steps", "15", "--json")
    assert '"best": 2' in again.output
    for options in (["--objective", "cost", "--name", "chase-local-generation-bound"], ["--set", "train.seed=3"]):
        other = rlkit_("chase", recipe, "--engine", "sim", "--steps", "15", *options)
        assert other.exit_code == 2
        assert "choose another --name" in other.output
    unpriced = rlkit_("chase", recipe, "--engine", "sim", "--budget-usd", "3")
    assert "hardware.usd_per_hour: not set" in unpriced.output
    advised = rlkit_("advise", "runs/out/chase-local-generation-bound/chase-local-generation-bound-1")
    assert advised.exit_code == 0, advised.output
    assert "rollout.max_inflight_tasks 8 -> " in advised.output
    assert "two cores that trainer and replicas share" in advised.output
    named = rlkit_("advise", "local", "--run", "chase-local-generation-bound-1", "--json")
    assert '"objective": "time"' in named.output


# Minutes of simulation: the whole chases.


def published(name: str, *overrides: str) -> Recipe:
    return load_recipe(RUNS / "published" / f"{name}.yaml", ["engine=sim", *overrides])


def chased(recipe: Recipe, place: Path, rules: Rules | None = None, steps: int = 60) -> tuple[Scoreboard, Recipe]:
    """The chase, and the recipe it ends on."""
    folder = ChaseFolder(place)
    done = chase(board(recipe, min(steps, recipe.train.steps), rules), recipe, folder)
    assert done.best is not None
    return done, load_recipe(folder.recipe(done.best))


@pytest.mark.slow
def test_the_published_chase_in_four_further_runs(tmp_path: Path) -> None:
    done, end = chased(published("r1-dp2"), tmp_path / "chase-it", Rules(max_runs=5))
    assert len(done.probes) <= 5
    assert (end.rollout.weight_sync_steps, end.rollout.max_staleness) == (4, 4)
    whole = predict(end, seeds=2)
    assert whole.steps == 500
    assert whole.wall_clock_min.high <= 54


@pytest.mark.slow
@pytest.mark.long
def test_the_published_chase_for_its_cost(tmp_path: Path) -> None:
    done, end = chased(published("r1-dp2"), tmp_path / "chase-it", Rules("cost", max_runs=5))
    assert len(done.probes) <= 5
    assert (end.rollout.weight_sync_steps, end.rollout.max_staleness) == (4, 4)
    whole = predict(end, seeds=2)
    assert whole.usd is not None
    assert whole.wall_clock_min.high <= 54
    assert whole.usd.high <= 14


ELSEWHERE = replace(Physics(), row_s=0.5, row_mfu=0.2, iteration_s=4e-3, sequence_s=1e-5, lag_s=5.0, load_s=1.4)


@pytest.mark.slow
def test_a_chase_on_another_cluster_is_predicted_by_its_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's constants are not those that advice begins with: what is predicted comes from what was measured."""
    monkeypatch.setattr(sim, "translate", lambda recipe: translate(recipe, ELSEWHERE))
    done, _ = chased(published("r1-dp2"), tmp_path / "chase-it", Rules(max_runs=5))
    assert done.best is not None
    assert done.best.figures is not None
    assert done.probes[0].figures is not None
    assert done.best.figures.wall_clock_min < done.probes[0].figures.wall_clock_min / 2.5
    for one in done.probes[1:]:
        assert one.figures is not None
        assert one.predicted is not None
        assert one.figures.wall_clock_min == pytest.approx(one.predicted.wall_clock_min, rel=0.25), one.changes


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("adaptive-cap/kv8g-main", []),
        ("local-trainer-bound", ["train.steps=40"]),
        ("published/r1-dp3-tb16k-nockpt", ["rollout.max_inflight_tasks=32", "serve.replicas=1"]),
        ("published/r1-dp3-inflight384", []),
    ],
)
def test_a_chase_from_elsewhere_improves_or_says_why_not(file: str, overrides: list[str], tmp_path: Path) -> None:
    recipe = load_recipe(RUNS / f"{file}.yaml", ["engine=sim", *overrides])
    done, _ = chased(recipe, tmp_path / "chase-it", Rules(max_runs=3), steps=40)
    assert done.best is not None
    first, best = done.probes[0].figures, done.best.figures
    assert first is not None
    assert best is not None
    assert best.wall_clock_min <= first.wall_clock_min
    assert best.wall_clock_min < 0.95 * first.wall_clock_min or "less than 5%" in done.stopped
