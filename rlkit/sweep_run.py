"""A sweep executed: each point a papermill run of its notebook in a kernel of its own, several at once.

What it leaves behind is told in `rlkit.sweep_folder`. Kernels end with the process that started them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from jupyter_core.utils import ensure_event_loop

from rlkit import display, machine
from rlkit.chart import VERMILLION
from rlkit.engines.hf_purse import Purse, billed
from rlkit.engines.state import read_state
from rlkit.errors import RlkitError, RunFailed
from rlkit.notebook_parameters import checked_parameters
from rlkit.report import KernelDied, execute_notebook, render, render_notebook, write_page
from rlkit.results import read_run
from rlkit.run_folder import RunFolder
from rlkit.sweep import TOTAL, Point, Sweep, load_sweep, next_point, parallel
from rlkit.sweep_current import INDEX
from rlkit.sweep_folder import (
    Ended,
    Status,
    Summary,
    SweepFolder,
    asked_for,
    claimed,
    in_words,
    read_ended,
    write_json,
)
from rlkit.sweep_kernels import Kernels
from rlkit.sweep_table import results_table, summarise

# A kernel that died is started once more: by chance it was short of memory, twice it is the point's own doing.
ATTEMPTS = 2

OnEnd = Callable[[Point, Ended, int], None]  # the point, how it ended, how many have ended by now


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
    with claimed(folder):
        folder.written.unlink(missing_ok=True)  # first: from here on table and index are not what it says
        write_json(folder.plan, asked_for(sweep))
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


def write_index(folder: SweepFolder) -> None:
    """index.html: notebooks/06_sweep.ipynb for what is in the folder. Raises RlkitError as a notebook does."""
    priced = bool(pd.read_parquet(folder.table, columns=["usd"])["usd"].notna().any())
    values = {"folder": folder.path, "page": folder.path, "launching": False}
    values |= {"against": "usd"} if priced else {}
    render_notebook(INDEX, values, folder.index, title=folder.path.resolve().name)


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
        write_json(folder.record(point), ended.to_dict())
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
