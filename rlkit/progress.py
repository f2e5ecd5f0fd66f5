"""A run's events as progress a person can follow: bars on a terminal, lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from rlkit.engines.base import Event

# What of a step is worth a glance: TRL's metric, how it is called here, its format.
_GLANCE = (
    ("reward", "reward {:.2f}"),
    ("perf/step_s", "{:.1f} s"),
    ("sample/rollout_queue_size", "queue {:.0f}"),
)
# Lines printed for all steps of a run, at most; beyond, a log of a long run drowns its phases.
MAX_STEP_LINES = 100


class RunProgress(AbstractContextManager["RunProgress"], Protocol):
    """Shows a run while it is open; call it with each event."""

    def __call__(self, event: Event) -> None: ...


def open_progress(console: Console) -> RunProgress:
    """Bars if `console` is a terminal, else one line an event."""
    if console.is_terminal:
        return BarProgress(console)
    return LineProgress(lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))


def at_a_glance(metrics: Mapping[str, float | None]) -> str:
    """Reward, seconds and queue size of a step, those that were logged."""
    values = [(text, metrics.get(name)) for name, text in _GLANCE]
    return "  ".join(text.format(value) for text, value in values if value is not None)


class LineProgress:
    """One line an event, with the seconds since the start: what fits a log file or a pipe."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock

    def __enter__(self) -> LineProgress:
        self._started = self._clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def __call__(self, event: Event) -> None:
        """Write one line; of a long run's steps every hundredth part, and the last."""
        if event.kind != "step":
            self._line(event.text)
        elif event.step == event.total or event.step % -(-event.total // MAX_STEP_LINES) == 0:
            self._line(f"step {event.step}/{event.total}  {at_a_glance(event.metrics)}".rstrip())

    def _line(self, text: str) -> None:
        self._write(f"[{self._clock() - self._started:5.0f} s] {text}")


class BarProgress:
    """A line for each phase with its seconds; the one that logs steps has a bar."""

    def __init__(self, console: Console) -> None:
        columns: list[ProgressColumn] = [
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[detail]}"),
        ]
        self._progress = Progress(*columns, console=console)
        self._phase: TaskID | None = None

    def __enter__(self) -> BarProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self._end_phase()
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Begin a phase, move the bar, or print a log line above it."""
        if event.kind == "log":
            self._progress.print(event.text, markup=False)
        elif event.kind == "phase":
            self._end_phase()
            self._phase = self._progress.add_task(escape(event.text), total=None, detail="")
        else:
            if self._phase is None:
                self._phase = self._progress.add_task("training", total=None, detail="")
            detail = f"{event.step}/{event.total}  {at_a_glance(event.metrics)}"
            self._progress.update(self._phase, completed=event.step, total=event.total, detail=detail)

    def _end_phase(self) -> None:
        if self._phase is None:
            return
        task = next(task for task in self._progress.tasks if task.id == self._phase)
        self._progress.update(self._phase, total=task.total or 1, completed=task.total or 1)
        self._progress.stop_task(self._phase)
