"""What the two Jobs' lines mean, and what follows for a recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.engines.hf_figures import Figures, figures_from, transport_findings
from rlkit.engines.hf_probe import MARK
from rlkit.recipe import Recipe, load_recipe

pytestmark = pytest.mark.hub

GOOD = Figures(
    early_s=3.0,
    late_s=2.5,
    hashes_match=True,
    renamed_s=3.0,
    rename_is_whole=True,
    status_without_token=401,
    token_reaches_the_job=True,
    held_s=600.0,
)


def said(**values: object) -> str:
    return MARK + json.dumps(values)


@pytest.fixture
def recipe() -> Recipe:
    path = Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml"
    return load_recipe(path, ["transport.retry_s=0.5"])


def test_figures_of_both_logs() -> None:
    written = [
        "some other line",
        said(event="written", name="early.bin", at=10.0, sha256="a"),
        said(event="written", name="late.bin", at=11.0, sha256="b"),
        said(event="written", name="renamed", at=12.0),
    ]
    looked = [
        said(event="listening", at=1.0),
        said(event="seen", name="early.bin", at=39.5, sha256="a", partial_looks=0),
        said(event="seen", name="late.bin", at=10.9, sha256="b", partial_looks=2),
        said(event="seen", name="renamed", at=15.0, partial_looks=1),
    ]
    figures = figures_from(written, looked, 401, True, 120.0)
    assert figures == Figures(29.5, 0.0, True, 3.0, False, 401, True, 120.0)
    assert figures.slowest_s == 29.5


def test_what_was_not_seen_is_not_known() -> None:
    figures = figures_from([], [said(event="unseen", name="early.bin", at=1.0)], None, None, None)
    assert set(figures.to_dict().values()) == {None}


def test_other_bytes_are_noticed() -> None:
    lines = [said(event=event, name="early.bin", at=1.0, sha256=event) for event in ("written", "seen")]
    assert figures_from(lines, lines, None, None, None).hashes_match is False


def test_good_figures_find_nothing(recipe: Recipe) -> None:
    assert not transport_findings(recipe, GOOD)


@pytest.mark.parametrize(
    ("changes", "field", "severity"),
    [
        ({"early_s": None}, "transport.kind", "error"),
        ({"hashes_match": False}, "transport.kind", "error"),
        ({"early_s": 30.0}, "transport.deadline_s", "error"),
        ({"early_s": 0.6, "late_s": 0.5, "renamed_s": 0.5}, "transport.retry_s", "warning"),
        ({"held_s": 60.0}, "rollout.request_timeout", "warning"),
    ],
)
def test_each_finding(recipe: Recipe, changes: dict[str, object], field: str, severity: str) -> None:
    (finding,) = transport_findings(recipe, replace(GOOD, **changes))  # type: ignore[arg-type]
    assert (finding.field, finding.severity) == (field, severity)


def test_push_needs_the_token_to_come_through(recipe: Recipe) -> None:
    pushing = recipe.with_overrides(["transport.kind=push"])
    assert not transport_findings(pushing, replace(GOOD, early_s=None))
    (finding,) = transport_findings(pushing, replace(GOOD, token_reaches_the_job=False))
    assert finding.field == "transport.kind"
