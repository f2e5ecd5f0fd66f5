"""A chase run by run, as a notebook shows it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
from several_runs import generation_bound, past_run, steps, trainer_bound

from rlkit import walk
from rlkit.past_run import PastRun
from rlkit.run_folder import RunFolder
from rlkit.scoreboard_text import Published


def told(runs: dict[str, PastRun], name: str, published: Published | None = None) -> str:
    """The chapter's words, a line a part, a figure by its title."""
    parts = [
        part.layout.title.text if isinstance(part, go.Figure) else re.sub(r"<[^>]+>", " ", part.data)
        for part in walk.chapter(runs, name, published or {})
    ]
    return "\n".join(" ".join(part.split()) for part in parts)


def test_a_chapter_goes_from_the_change_to_the_verdict_to_what_came_next() -> None:
    runs = {"slow": trainer_bound(), "fast": generation_bound("fast", "train.token_budget=1024")}
    first = told(runs, "slow").splitlines()
    assert first[0] == "Run 1: slow"
    assert first[1].startswith("Where it begins: toy-arithmetic on 1 replica, 64 rollouts in flight, a queue of 256")
    assert first[2] == "What does the dashboard of slow show?"
    assert first[3].startswith("Trainer-bound: ")
    assert first[4].startswith("The cause: ")
    assert first[5] == "What was changed next: train.token_budget 512 → 1024."
    second = told(runs, "fast").splitlines()
    assert second[2] == "Field Before Now train.token_budget 512 1024"
    assert second[3] == "What did train.token_budget 512 → 1024 change?"
    assert second[4].startswith("Generation-bound: ")
    assert not second[-1].startswith("What was changed next")


def test_what_its_authors_said_stands_beside_the_verdict() -> None:
    runs = {"slow": trainer_bound(), "fast": generation_bound("fast", "train.token_budget=1024")}
    published: Published = {"slow": {"verdict": "trainer-bound", "cause": "tiny rows", "next": "pack"}}
    assert told(runs, "slow", published).endswith("\nIts authors said: trainer-bound, tiny rows; next: pack.")
    published = {"fast": {"verdict": "trainer-bound", "cause": "compute", "next": None}}
    assert told(runs, "fast", published).endswith("compute; there the chase ended.")


def test_runs_without_a_recipe_or_without_a_change_are_walked_through_too() -> None:
    bare = past_run("<b>", steps(perf__step_s=1, perf__fwd_bwd_s=1), logged_recipe=False)
    runs = {"<b>": bare, "a": trainer_bound("a"), "b": trainer_bound("b")}
    html = "".join(part.data for part in walk.chapter(runs, "<b>") if not isinstance(part, go.Figure))
    assert "<h2>Run 1: &lt;b&gt;</h2>" in html
    assert "it recorded no recipe" in html
    assert "What changed is unknown" in told(runs, "a")
    assert "Nothing changed: the same recipe again." in told(runs, "b")


def test_commands_repeat_each_run_that_has_a_folder_and_the_page() -> None:
    runs = {"slow": replace(trainer_bound(), folder=RunFolder(Path("/runs/my slow"))), "fast": generation_bound()}
    assert list(walk.commands(runs)) == [
        "rlkit run '/runs/my slow/recipe.yaml'",
        "rlkit compare '/runs/my slow' several/fast --out page.html",
    ]
