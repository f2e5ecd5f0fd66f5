from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.chase import Probe, Rules, Scoreboard, Start, Stop, Try, best_of, decide
from rlkit.chase_folder import ChaseFolder, with_run
from rlkit.counsel import Advice, Figures, Limits
from rlkit.errors import BadInput
from rlkit.recipe import load_recipe, recipe_diff

CHASE = load_recipe(Path(__file__).parents[1] / "runs" / "published" / "r1-dp2.yaml", ["engine=sim"])


def figures(minutes: float, usd: float | None = None) -> Figures:
    return Figures(minutes * 60 / 500, minutes, usd, minutes / 15, 1.0, 0.0, 128.0, 0.0)


def advice(name: str, minutes: float, gain: float, usd: float | None = None) -> Advice:
    return Advice(name, (), (f"{name}=1",), ((name, 0, 1),), figures(minutes, usd), gain, ("It costs.",), False)


def probe(number: int, minutes: float | None, *found: Advice, parent: int | None = None, made_by: str = "") -> Probe:
    return Probe(
        number,
        f"{number}.yaml",
        f"chase-{number}",
        parent=parent,
        overrides=(f"{made_by}=1",) if made_by else (),
        figures=None if minutes is None else figures(minutes, minutes / 3),
        failure="" if minutes is not None else "out of memory",
        advice=found,
    )


def test_it_begins_with_the_recipe_as_it_is_and_takes_the_best_advice() -> None:
    assert decide([], Rules()) == Start()
    first = probe(1, 200, advice("pack", 60, 0.7), advice("push", 180, 0.1))
    assert decide([first], Rules()) == Try(first, first.advice[0])


def test_it_ends_when_nothing_is_worth_a_run() -> None:
    ended = decide([probe(1, 200, advice("push", 192, 0.04))], Rules())
    assert isinstance(ended, Stop)
    assert ended.reason == "the most that a change is predicted to save is 4% of the time, less than 5%"


def test_what_brought_nothing_is_not_tried_again_and_the_best_run_goes_on() -> None:
    first = probe(1, 200, advice("pack", 60, 0.7), advice("push", 180, 0.1))
    worse = probe(2, 220, advice("anything", 10, 0.9), parent=1, made_by="pack")
    assert decide([first, worse], Rules()) == Try(first, first.advice[1])


def test_a_change_whose_run_failed_is_not_tried_again_anywhere() -> None:
    first = probe(1, 200, advice("pack", 60, 0.7), advice("push", 180, 0.1))
    failed = probe(2, None, parent=1, made_by="pack")
    better = probe(3, 180, advice("pack", 50, 0.7), advice("cap", 150, 0.2), parent=1, made_by="push")
    assert decide([first, failed, better], Rules()) == Try(better, better.advice[1])


def test_a_run_limit_names_what_is_left() -> None:
    ended = decide([probe(1, 200, advice("pack", 60, 0.7))], Rules(max_runs=1))
    assert isinstance(ended, Stop)
    assert "--max-runs 1" in ended.reason
    assert "pack 0 -> 1" in ended.reason


def test_a_cheaper_recipe_that_is_slower_than_the_first_is_not_the_end() -> None:
    first = probe(1, 100, advice("fewer", 150, 0.5, 10))
    assert isinstance(decide([first], Rules("cost")), Stop)
    slower = replace(probe(2, 150, parent=1, made_by="fewer"), figures=figures(150, 1))
    assert best_of([first, slower], Rules("cost")) == first


def test_what_keeps_to_a_deadline_beats_what_is_cheaper() -> None:
    cheap = replace(probe(1, 100), figures=figures(100, 10))
    quick = replace(probe(2, 50, parent=1, made_by="a"), figures=figures(50, 12))
    assert best_of([cheap, quick], Rules("cost")) == cheap
    assert best_of([cheap, quick], Rules("cost", Limits(deadline_min=54))) == quick


def test_a_first_run_that_failed_ends_it() -> None:
    assert decide([probe(1, None)], Rules()) == Stop("the first run failed: out of memory")


@st.composite
def _worlds(draw: st.DrawFn) -> list[tuple[float | None, list[tuple[str, float]]]]:
    """What each run measures, and the gains it is advised; advice may be wrong in any way."""
    gains = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(-0.5, 0.9)), max_size=4)
    return draw(st.lists(st.tuples(st.none() | st.floats(1, 500), gains), min_size=12, max_size=12))


@given(_worlds(), st.sampled_from(["time", "cost"]), st.none() | st.floats(1, 400), st.integers(1, 8))
def test_it_ends_and_never_on_a_slower_recipe(
    world: Sequence[tuple[float | None, list[tuple[str, float]]]], objective: str, deadline: float | None, most: int
) -> None:
    rules = Rules("cost" if objective == "cost" else "time", Limits(deadline), most)
    probes: list[Probe] = []
    tried: set[tuple[int, tuple[str, ...]]] = set()
    while not isinstance(step := decide(probes, rules), Stop):
        minutes, gains = world[len(probes)]
        found = [advice(name, 1, gain) for name, gain in gains]
        parent = step.parent.number if isinstance(step, Try) else None
        made_by = step.advice.slug if isinstance(step, Try) else ""
        if isinstance(step, Try):
            assert step.advice.gain >= rules.worthwhile
            assert (step.parent.number, step.advice.overrides) not in tried
            tried.add((step.parent.number, step.advice.overrides))
        probes.append(probe(len(probes) + 1, minutes, *found, parent=parent, made_by=made_by))
    assert 1 <= len(probes) <= most
    best = best_of(probes, rules)
    first = probes[0].figures
    if first is not None:
        assert best is not None
        assert best.figures is not None
        assert best.figures.wall_clock_min <= 1.01 * first.wall_clock_min


def board(*probes: Probe) -> Scoreboard:
    return Scoreboard("chase-x", "r1-dp2", "sim", 500, 60, Rules("cost", Limits(54, None)), probes)


def test_a_scoreboard_is_read_back_as_it_was(tmp_path: Path) -> None:
    place = ChaseFolder(tmp_path / "chase-x")
    assert place.load() is None
    written = board(probe(1, 200, advice("pack", 60, 0.7)), probe(2, None, parent=1, made_by="pack"))
    place.save(written)
    assert place.load() == written
    assert json.loads(place.scoreboard.read_text())["best"] == 1


def test_a_broken_scoreboard_is_one_line(tmp_path: Path) -> None:
    place = ChaseFolder(tmp_path)
    for text in ("{", "[]", '{"name": 1}'):
        place.scoreboard.write_text(text)
        with pytest.raises(BadInput, match="not the scoreboard of a chase"):
            place.load()


def test_each_recipe_reads_as_its_change(tmp_path: Path) -> None:
    place = ChaseFolder(tmp_path / "chase-x")
    first = place.write_start(CHASE)
    assert load_recipe(place.recipe(first)) == CHASE
    change = Advice(
        "rows",
        ("tiny-rows",),
        ("train.token_budget=16384", "cap.policy=rlkit"),
        (("train.token_budget", 0, 16384), ("cap.policy", "none", "rlkit"), ("serve.kv_cache_gib", 8.0, None)),
        figures(60, 20),
        0.7,
        ("Samples vary.",),
        False,
    )
    second = place.write_change(2, replace(first, headline="Trainer-bound: #1."), change, CHASE)
    new = load_recipe(place.recipe(second))
    assert {name: value for name, _, value in recipe_diff(CHASE, new)} == {
        "train.token_budget": 16384,
        "cap.policy": "rlkit",
    }
    text = place.recipe(second).read_text()
    assert text.startswith("# Run 2 of a chase from r1-dp2: train.token_budget 0 -> 16384")
    assert "extends: 1-start.yaml\nname: r1-dp2-2-rows\n" in text
    shown = replace(second, figures=figures(58, 19), steps=60, headline="Generation-bound.")
    for _ in range(2):
        place.write_outcome(shown)
    assert place.recipe(second).read_text().count("What it showed: 6.96 s a step, 58.0 minutes, 19.00 USD") == 1
    assert load_recipe(place.recipe(second)) == new
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_run_is_added_at_the_end() -> None:
    assert [one.number for one in with_run(board(probe(1, 200)), probe(2, 100, parent=1, made_by="a")).probes] == [1, 2]
