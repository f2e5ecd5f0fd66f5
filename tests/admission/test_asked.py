"""The limit that a person sets: read again and again, never an error, never above the ceiling."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import recipe

from rlkit.admission.asked import AskedLimit, ask, parse_limit, why_not
from rlkit.admission.law import Reading, at_most, decide
from rlkit.errors import BadInput
from rlkit.recipe import Recipe


def capped(*overrides: str) -> Recipe:
    return recipe().with_overrides(["cap.policy=rlkit", *overrides])


def test_what_is_asked_is_read_at_the_next_look_and_lifted_again(tmp_path: Path) -> None:
    file = tmp_path / "control.json"
    limit = AskedLimit(file)
    assert limit.read() is None
    ask(file, 12, capped())
    assert limit.read() == 12
    ask(file, None, capped())
    assert limit.read() is None


def test_a_broken_file_changes_nothing_and_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "control.json"
    limit = AskedLimit(file)
    ask(file, 12, capped())
    assert limit.read() == 12
    file.write_text('{"max_inf')
    with caplog.at_level(logging.WARNING):
        assert [limit.read(), limit.read()] == [12, 12]
    assert len(caplog.records) == 1
    file.unlink()
    assert limit.read() is None


@pytest.mark.parametrize("most", [0, -3, 65])
def test_a_limit_outside_the_recipes_own_is_refused(tmp_path: Path, most: int) -> None:
    with pytest.raises(BadInput, match=rf"max_inflight: {most} is outside 1 to 64, .*rollout\.max_inflight_tasks"):
        ask(tmp_path / "control.json", most, capped())
    assert not list(tmp_path.iterdir())


def test_a_run_that_nobody_can_hold_to_less_says_why(tmp_path: Path) -> None:
    assert why_not(capped()) is None
    for change, why in (
        ("cap.policy=none", "cap.policy"),
        ("engine=sim", "engine sim"),
        ("engine=hf", "other machines"),
    ):
        with pytest.raises(BadInput, match=why):
            ask(tmp_path / "control.json", 3, capped(change))


@given(st.one_of(st.text(), st.recursive(st.none() | st.booleans() | st.integers(), st.lists).map(json.dumps)))
def test_any_text_is_a_limit_or_a_value_error(text: str) -> None:
    try:
        most = parse_limit(text)
    except ValueError:
        return
    assert most is None or most >= 1


@given(st.integers(1, 500), st.none() | st.integers(1, 500))
def test_a_limit_only_ever_lowers_the_cap(cap: int, most: int | None) -> None:
    decision = decide(Reading(0.0, {}, 3, 0, 1), cap, "held", "Nothing changed.")
    under = at_most(decision, most)
    assert under.cap == min(cap, cap if most is None else most)
    assert (under == decision) == (under.cap == cap)
