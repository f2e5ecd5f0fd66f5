from __future__ import annotations

import io
from itertools import count

import pytest
from rich.console import Console

from rlkit.engines.base import Event
from rlkit.progress import MAX_STEP_LINES, BarProgress, LineProgress, at_a_glance, open_progress

STEP = {"reward": 0.4126, "perf/step_s": 1.84, "sample/rollout_queue_size": 63.6, "kl": 0.1}


def step(number: int, total: int) -> Event:
    return Event("step", step=number, total=total, metrics=dict(STEP))


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (STEP, "reward 0.41  1.8 s  queue 64"),
        ({"reward": 0.0}, "reward 0.00"),
        ({"reward": None, "perf/step_s": 2.0}, "2.0 s"),
        ({}, ""),
    ],
)
def test_a_step_at_a_glance_says_what_was_logged(metrics: dict[str, float | None], text: str) -> None:
    assert at_a_glance(metrics) == text


def test_lines_carry_the_seconds_since_the_start() -> None:
    lines: list[str] = []
    clock = count(100.0, 7.0)
    with LineProgress(lines.append, clock=lambda: next(clock)) as progress:
        progress(Event("phase", text="starting 2 vLLM replicas"))
        progress(step(1, 50))
        progress(Event("log", text="[not] markup"))
        progress(Event("step", step=2, total=50))
    assert lines == [
        "[    7 s] starting 2 vLLM replicas",
        "[   14 s] step 1/50  reward 0.41  1.8 s  queue 64",
        "[   21 s] [not] markup",
        "[   28 s] step 2/50",
    ]


@pytest.mark.parametrize(("total", "printed"), [(50, 50), (100, 100), (101, 51), (500, 100), (1999, 100)])
def test_a_long_run_does_not_drown_in_steps(total: int, printed: int) -> None:
    lines: list[str] = []
    with LineProgress(lines.append, clock=lambda: 0.0) as progress:
        for number in range(1, total + 1):
            progress(step(number, total))
    assert len(lines) == printed <= MAX_STEP_LINES
    assert f"step {total}/{total}" in lines[-1]


def show(events: list[Event], error: Exception | None = None) -> str:
    """What a terminal of 120 columns ends up showing."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    progress = open_progress(console)
    assert isinstance(progress, BarProgress)
    try:
        with progress:
            for event in events:
                progress(event)
            if error is not None:
                raise error
    except RuntimeError:
        pass
    return file.getvalue()


def test_on_a_terminal_phases_are_ticked_off_and_steps_move_a_bar() -> None:
    shown = show([Event("phase", text="starting [2] replicas"), Event("phase", text="training"), step(50, 50)])
    last = shown.split("\n")[-3:]
    assert any("✓ starting [2] replicas" in line for line in last)
    assert any("✓ training" in line and "50/50  reward 0.41" in line for line in last)


def test_a_run_that_breaks_keeps_its_last_phase_open() -> None:
    shown = show([Event("phase", text="proxy"), Event("phase", text="training"), step(3, 50)], RuntimeError())
    last = shown.split("\n")[-3:]
    assert any("✓ proxy" in line for line in last)
    assert not any("✓ training" in line for line in last)
    assert any("3/50" in line for line in last)


def test_a_log_line_stands_above_the_bars_as_it_is() -> None:
    assert "[bold]no markup" in show([Event("phase", text="x"), Event("log", text="[bold]no markup")])


def test_steps_without_a_phase_have_a_bar_too() -> None:
    assert "training" in show([step(1, 2)])


def test_a_pipe_gets_lines() -> None:
    file = io.StringIO()
    with open_progress(Console(file=file, width=20)) as progress:
        assert isinstance(progress, LineProgress)
        progress(Event("phase", text="a phase whose name is longer than the console is wide"))
    assert file.getvalue().endswith("a phase whose name is longer than the console is wide\n")
