"""A sweep that is killed on the way, 200 simulated points: python tests/bench/sweep.py [GRID.yaml] [--kills 2] [--json]

The sweep is a process of its own. It is killed (SIGKILL) each time another part of the points has ended, and started
again. Afterwards a part of the points is run anew elsewhere, and its rows must be those of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import psutil

from rlkit import machine
from rlkit.sweep import load_sweep
from rlkit.sweep_folder import SweepFolder
from rlkit.sweep_run import run_sweep

GRID = Path(__file__).parents[2] / "runs" / "sweeps" / "chase.yaml"
WANTED_S = 600
LOOK_EVERY_S = 0.1
# A kernel looks for its parent every second, and a busy machine lets it look later.
ENDED_WITHIN_S = 15.0

# Points run a second time, to compare: every tenth.
COMPARED = 10


def main() -> None:
    """Sweep, kill, sweep again, compare, and print how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("grid", type=Path, nargs="?", default=GRID)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlkit-sweep-") as folder:
        took = measure(arguments.grid, Path(folder), arguments.kills)
    if arguments.json:
        print(json.dumps(took, indent=2))
    else:
        print("  ".join(f"{name} {value}" for name, value in took.items()))
    if not took["same_rows"] or took["left_running"]:
        sys.exit(1)


def measure(grid: Path, folder: Path, kills: int) -> dict[str, object]:
    """Seconds from the first start to the index, kills included, and whether the table is what it would have been."""
    sweep = load_sweep(grid)
    out, total = SweepFolder(folder / "killed"), len(sweep.points)
    began, left = time.monotonic(), 0
    for kill in range(kills):
        ended = killed_after(grid, out.path, (kill + 1) * total // (kills + 1))
        left += ended
    command(grid, out.path).wait()
    seconds = time.monotonic() - began
    table = pd.read_parquet(out.table)
    part = replace(sweep, points=sweep.points[::COMPARED])
    run_sweep(part, folder / "again")
    return {
        "points": total,
        "done": int((table["status"] == "done").sum()),
        "kills": kills,
        "left_running": left,
        "seconds": round(seconds, 1),
        "cores": machine.cores(),
        "load": round(os.getloadavg()[1], 1),
        "wanted_seconds": WANTED_S,
        "pages": len(list(out.path.glob("points/*/report.html"))) + out.index.exists(),
        "same_rows": same_rows(table, pd.read_parquet(folder / "again" / "results.parquet")),
    }


def command(grid: Path, out: Path) -> subprocess.Popen[bytes]:
    """`rlkit sweep` as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlkit", "sweep", str(grid), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def killed_after(grid: Path, out: Path, points: int) -> int:
    """Run until so many points have ended, then SIGKILL; the processes that outlive it by five seconds."""
    sweep = command(grid, out)
    while sweep.poll() is None and len(list(out.glob("points/*/point.json"))) < points:
        time.sleep(LOOK_EVERY_S)
    started = psutil.Process(sweep.pid).children(recursive=True) if sweep.poll() is None else []
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    _, alive = psutil.wait_procs(started, timeout=ENDED_WITHIN_S)
    return sum(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in alive)


def same_rows(table: pd.DataFrame, again: pd.DataFrame) -> bool:
    """Whether the rows of `again` are in the table, but for their numbers."""
    part = table[table["name"].isin(again["name"])]
    columns = [name for name in again.columns if name != "point"]
    return part[columns].reset_index(drop=True).equals(again[columns].reset_index(drop=True))


if __name__ == "__main__":
    main()
