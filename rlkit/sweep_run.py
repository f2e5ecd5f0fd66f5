"""A sweep executed: each point a papermill run of its notebook in a kernel of its own, several at once.

    <out>/sweep.json                 what was asked for
    <out>/recipes/<name>.yaml        what each point's notebook is given
    <out>/points/<name>/             one folder a point, the folder of its run: recipe.yaml, verdict.json, ...
        report.html, point.json      its page, and how it ended; without the second it has not
    <out>/results.parquet, .json     one row a point (`rlkit.sweep_table`)
    <out>/index.html                 the table, the figures, a link to every page (notebooks/06_sweep.ipynb)

Whatever kills the sweep, a point is there as a whole or to be run again: `point.json` is written last, and whole or not
at all. Kernels end with the process that started them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import nbformat
import pandas as pd
from jupyter_core.utils import ensure_event_loop

from rlkit import display, machine
from rlkit.chart import VERMILLION
from rlkit.engines.hf_purse import Purse, billed
from rlkit.engines.state import read_state
from rlkit.errors import BadInput, RlkitError, RunFailed
from rlkit.report import KernelDied, checked_parameters, execute_notebook, render, render_notebook, write_page
from rlkit.results import read_run
from rlkit.run_folder import RunFolder
from rlkit.sweep import TOTAL, Point, Sweep, load_sweep, next_point, parallel
from rlkit.sweep_kernels import Kernels
from rlkit.sweep_table import Summary, column_of, results_table, summarise

INDEX = Path(__file__).parents[1] / "notebooks" / "06_sweep.ipynb"

# A kernel that died is started once more: by chance it was short of memory, twice it is the point's own doing.
ATTEMPTS = 2

Status = Literal["done", "failed", "skipped"]


@dataclass(frozen=True)
class Ended:
    """How a point ended; `summary` is None unless its run left a verdict."""

    key: str
    status: Status
    error: str | None = None
    attempts: int = 1
    seconds: float = 0.0  # of this machine, kernel and page included
    summary: Summary | None = None
    spent_usd: float = 0.0  # on rented hardware, also by a point that failed

    def to_dict(self) -> dict[str, Any]:
        """As `point.json` holds it."""
        return asdict(self)


OnEnd = Callable[[Point, Ended, int], None]  # the point, how it ended, how many have ended by now


@dataclass(frozen=True)
class SweepFolder:
    """Names of the files of a sweep. Nothing here touches the disk."""

    path: Path

    @property
    def plan(self) -> Path:
        """What was asked for (JSON)."""
        return self.path / "sweep.json"

    @property
    def table(self) -> Path:
        """One row a point (parquet); its JSON twin lies beside it."""
        return self.path / "results.parquet"

    @property
    def index(self) -> Path:
        """The page that leads to all others."""
        return self.path / "index.html"

    def run(self, point: Point) -> RunFolder:
        """The folder of a point's run."""
        return RunFolder(self.path / "points" / point.name)

    def recipe(self, point: Point) -> Path:
        """What a point's notebook is given as its recipe."""
        return self.path / "recipes" / f"{point.name}.yaml"

    def record(self, point: Point) -> Path:
        """How a point ended (JSON)."""
        return self.run(point).path / "point.json"


@dataclass
class _State:
    waiting: list[Point]
    purse: Purse
    running: dict[Future[Ended], Point] = field(default_factory=dict)
    ended: dict[str, Ended] = field(default_factory=dict)


def run_sweep(
    sweep: Sweep,
    out: Path,
    on_end: OnEnd = lambda point, ended, count: None,
    retry_failed: bool = False,
) -> dict[str, Ended]:
    """Run what has not ended yet, and return how every point ended, by its key; the table is written in any case.

    A point that fails is kept and stops no other. Raises BadInput for a folder that something else is in or that
    another sweep is running in. On KeyboardInterrupt the kernels are stopped and what has ended stays.
    """
    folder = SweepFolder(out)
    with _claimed(folder, sweep):
        # Where no point is rented there is no limit, and nothing is asked of the purse.
        state = _State([], Purse(sweep.limits.usd or 0.0, TOTAL))
        for point in sweep.points:
            ended = read_ended(folder, point)
            state.purse.ended(point.key, _spent_so_far(folder, point) if ended is None else ended.spent_usd)
            if ended is None or (retry_failed and ended.status == "failed"):
                state.waiting.append(point)
            else:
                state.ended[point.key] = ended
        kernels = Kernels()
        try:
            if state.waiting:
                _run_all(sweep, folder, state, kernels, on_end)
        finally:
            kernels.close()
            write_table(sweep, folder, state.ended)
        return state.ended


def run_and_say(grid: Path, out: Path, say: Callable[[str], object]) -> dict[str, Ended]:
    """The sweep of a grid's file, with a line for each point that ends. Raises BadInput before anything starts."""
    sweep = load_sweep(grid)

    def tell(point: Point, ended: Ended, count: int) -> None:
        say(f"[{count}/{len(sweep.points)}] {in_words(point, ended)}")

    return run_sweep(sweep, out, tell)


def in_words(point: Point, ended: Ended) -> str:
    """How a point ended, on one line."""
    dead = ended.attempts - (ended.status == "done")
    again = f" (its kernel died {dead} time{'s' * (dead > 1)})" if ended.attempts > 1 else ""
    if ended.summary is None:
        reason = next(iter((ended.error or "").splitlines()), "")
        return f"{ended.status}: {point.label}: {reason}{again}"
    step = "" if ended.summary.step_s is None else f", {ended.summary.step_s:.2f} s a step"
    return f"{ended.summary.verdict}{step}: {point.label}{again}"


def write_index(folder: SweepFolder) -> None:
    """index.html: notebooks/06_sweep.ipynb for what is in the folder. Raises RlkitError as a notebook does."""
    priced = bool(pd.read_parquet(folder.table, columns=["usd"])["usd"].notna().any())
    values = {"folder": folder.path, "page": folder.path, "launching": False}
    values |= {"against": "usd"} if priced else {}
    render_notebook(INDEX, values, folder.index, title=folder.path.resolve().name)


def read_ended(folder: SweepFolder, point: Point) -> Ended | None:
    """How a point ended, None when it has not, or when what is there is another content's."""
    try:
        found = json.loads(folder.record(point).read_text(encoding="utf-8"))
        summary = found.pop("summary")
        ended = Ended(**found, summary=None if summary is None else Summary(**summary))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return ended if ended.key == point.key else None


def write_table(sweep: Sweep, folder: SweepFolder, ended: dict[str, Ended]) -> None:
    """results.parquet and its JSON twin, a row for each point of the sweep that has ended or not."""
    table = results_table(sweep, ended)
    for target, write in (
        (folder.table, table.to_parquet),
        (folder.table.with_suffix(".json"), lambda path: table.to_json(path, orient="records", indent=2)),
    ):
        part = target.with_name(f".{target.name}.part")
        write(part)
        os.replace(part, target)


def _run_all(sweep: Sweep, folder: SweepFolder, state: _State, kernels: Kernels, on_end: OnEnd) -> None:
    cores, limits = machine.cores(), sweep.limits
    engines = {point.recipe.engine for point in state.waiting}
    most = sum(parallel(engine, limits, cores) for engine in engines)
    with ThreadPoolExecutor(most, thread_name_prefix="point") as pool:
        try:
            while state.waiting or state.running:
                running = list(state.running.values())
                while (point := next_point(state.waiting, running, limits, cores)) is not None:
                    rented, most_usd = point.recipe.engine == "hf", point.recipe.hardware.budget_usd or 0.0
                    refused = state.purse.refusal(point.key, most_usd) if rented else None
                    if refused is not None and state.purse.going:
                        break  # those that run may take less than they could
                    state.waiting.remove(point)
                    if refused is not None:
                        state.ended[point.key] = Ended(point.key, "skipped", refused)
                        on_end(point, state.ended[point.key], len(state.ended))
                        continue
                    running.append(point)
                    if rented:
                        state.purse.start(point.key, most_usd)
                    state.running[pool.submit(_in_own_loop, _run_point, sweep, folder, point, kernels)] = point
                for future in wait(state.running, return_when=FIRST_COMPLETED).done:
                    point = state.running.pop(future)
                    ended = state.ended[point.key] = future.result()
                    state.purse.ended(point.key, ended.spent_usd)
                    on_end(point, ended, len(state.ended))
        except BaseException:
            kernels.stop()  # the threads end with their kernels
            raise


def _in_own_loop(work: Callable[..., Ended], *arguments: Any) -> Ended:
    """Papermill's client makes an event loop for the thread it is in, and leaves it open."""
    try:
        return work(*arguments)
    finally:
        ensure_event_loop().close()
        asyncio.set_event_loop(None)


def _run_point(sweep: Sweep, folder: SweepFolder, point: Point, kernels: Kernels) -> Ended:
    run = folder.run(point)
    folder.record(point).unlink(missing_ok=True)
    if point.recipe.engine == "sim":
        shutil.rmtree(run.path, ignore_errors=True)  # nothing to go on with: it takes seconds
    run.path.mkdir(parents=True, exist_ok=True)
    plan = folder.recipe(point)
    plan.parent.mkdir(exist_ok=True)
    plan.write_text(point.recipe.to_yaml(), encoding="utf-8")
    given = {"recipe": plan, "folder": run.path} | point.parameters
    values = checked_parameters(sweep.notebook, given)
    # The run logs into its own folder, where `rlkit.results.read_run` looks first.
    environment = {"TRACKIO_DIR": str((run.path / "trackio").resolve())}
    manager = kernels.manager(environment, forked=point.recipe.engine == "sim")
    began, attempts, error, summary = time.monotonic(), 0, None, None
    while True:
        attempts += 1
        try:
            executed = execute_notebook(sweep.notebook, values, kernel_manager_class=manager)
            summary = _summary_of(run, sweep)
            page = render(executed, point.name)
        except Exception as failure:  # papermill's, zmq's and Jupyter's, when a kernel cannot even start
            told = isinstance(failure, RlkitError) and not isinstance(failure, KernelDied)
            if not told and attempts < ATTEMPTS and not kernels.stopping:
                continue
            known = isinstance(failure, RlkitError)
            error = str(failure) if known else f"{sweep.notebook.name}: {type(failure).__name__}: {failure}"
            page = _failed_page(point, error)
        break
    write_page(run.report, page)
    seconds = round(time.monotonic() - began, 2)
    status: Status = "done" if error is None else "failed"
    ended = Ended(point.key, status, error, attempts, seconds, summary, billed(point.recipe, read_state(run)))
    if not kernels.stopping:  # a point that was stopped has not ended
        _write_json(folder.record(point), ended.to_dict())
    return ended


def _spent_so_far(folder: SweepFolder, point: Point) -> float:
    """By a rented point that has not ended: nothing when it never started."""
    run = folder.run(point)
    return billed(point.recipe, read_state(run)) if run.state.exists() else 0.0


def _summary_of(run: RunFolder, sweep: Sweep) -> Summary:
    try:
        logged, recipe = read_run(run)
        return summarise(run, sweep.base, logged.frame, recipe)
    except RlkitError as failure:
        raise RunFailed(f"{sweep.notebook.name}: left no run in its folder: {failure}") from None


def _failed_page(point: Point, error: str) -> str:
    first, _, rest = error.partition("\n")
    shown = [
        (["headline"], display.statement(f"Failed: {first.rstrip('.')}.", {"point": point.label}, edge=VERMILLION)),
        ([], display.folded("The end of the log", rest) if rest else None),
        ([], display.table(display.settings(point.recipe))),
    ]
    cells = [
        nbformat.v4.new_code_cell(
            "",
            metadata={"tags": tags},
            outputs=[nbformat.v4.new_output("display_data", data={"text/html": html.data})],
        )
        for tags, html in shown
        if html is not None
    ]
    return render(nbformat.v4.new_notebook(cells=cells), point.name)


@contextmanager
def _claimed(folder: SweepFolder, sweep: Sweep) -> Iterator[None]:
    """The folder, for this sweep alone while it runs; what is asked for is written into it."""
    path = folder.path
    if (path / "recipe.yaml").exists():
        raise BadInput(f"{path}: holds a run, not a sweep; choose another --out")
    problem = machine.unwritable(path)
    if problem is not None:
        raise BadInput(f"{path}: {problem}; choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{path}: a sweep is going on here; choose another --out") from None
        points = [{"name": point.name, "values": point.values} for point in sweep.points]
        asked = {"name": sweep.name, "notebook": str(sweep.notebook), "points": points}
        asked["fields"] = [column_of(field) for field in sweep.fields]
        _write_json(folder.plan, asked | {"recipe": sweep.base.to_dict()})
        yield


def _write_json(path: Path, data: object) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)
