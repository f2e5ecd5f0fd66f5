"""What the proxy costs: python tests/bench/proxy.py [--vllm-router COMMAND]

CPU seconds of each proxy's process per 1,000 requests (4 KB prompts in groups of eight), by size of the answer and
number of connections, medians over rounds whose order rotates; replicas and load are other processes. Beside rlkit's
proxy: vllm-router, when its command is given (pip install vllm-router==0.1.17, in an environment of its own), and a
plain aiohttp proxy with the same routing rule; each of them also before replicas behind TLS. Then the latency added at
one connection, and memory with 4,096 requests in flight. Prints tables, and all of it as JSON in the last line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from subjects import SUBJECTS, Machine, Missing, Subject, load

SIZES = (30_000, 300_000)
CONNECTIONS = (64, 256, 1024)
ROUNDS = 3

# Enough for a tenth of a CPU second, the clock ticks of the kernel being a hundredth.
REQUESTS = 6000

LATENCY_REQUESTS = 3000
IN_FLIGHT = 4096

# What is wanted of rlkit's proxy; the first two of the rows without TLS, where the cost is the proxy's own.
MOST_OF_VLLM_ROUTER = 0.5
MOST_OF_PLAIN = 0.15
MOST_ADDED_MS = 0.3
MOST_MEMORY_MB = 200


def measure(machine: Machine, subject: Subject, size: int, connections: int, requests: int) -> dict[str, Any]:
    """One measurement: CPU seconds per 1,000 requests, and how the requests went."""
    machine.answer_with(size, gate=0)
    with machine.running(subject) as proxy:
        measured: dict[str, Any] = load(proxy.url, connections, requests, proxy)
        return measured


def table(machine: Machine, subjects: Sequence[Subject], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cell, subject and round; one row a cell and subject, medians over the rounds."""
    rows = []
    for size in options.sizes:
        for connections in options.connections:
            results: dict[str, list[dict[str, Any]]] = {subject.name: [] for subject in subjects}
            for number in range(options.rounds):
                order = [*subjects[number % len(subjects) :], *subjects[: number % len(subjects)]]
                for subject in order:
                    _say(f"{size} bytes, {connections} connections, round {number + 1}: {subject.name}")
                    results[subject.name].append(measure(machine, subject, size, connections, options.requests))
            rows += [{"bytes": size, "connections": connections, **_medians(name, results[name])} for name in results]
    return rows


def added_latency(machine: Machine, subjects: Sequence[Subject], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds a request takes longer through each proxy than without one, at one connection; medians."""
    machine.answer_with(SIZES[0], gate=0)
    rows = []
    for subject in subjects:
        _say(f"latency: {subject.name}")
        added = []
        for _ in range(rounds):
            with machine.running(subject) as proxy:
                direct = load(machine.plain_url, 1, LATENCY_REQUESTS)["median_ms"]
                added.append(load(proxy.url, 1, LATENCY_REQUESTS)["median_ms"] - direct)
        rows.append({"name": subject.name, "added_ms": statistics.median(added), "rounds_ms": added})
    return rows


def crowd(machine: Machine, subject: Subject) -> dict[str, Any]:
    """Memory and errors with 4,096 requests in flight at once, all answered at the same moment."""
    _say(f"{IN_FLIGHT} in flight: {subject.name}")
    machine.answer_with(SIZES[0], gate=0)
    with machine.running(subject) as proxy:
        machine.answer_with(SIZES[0], gate=IN_FLIGHT)
        result = load(proxy.url, IN_FLIGHT, 2 * IN_FLIGHT)
        return {"name": subject.name, "peak_mb": proxy.peak_mb(), "errors": result["errors"]}


def verdict(result: dict[str, Any]) -> dict[str, bool]:
    """What is wanted of rlkit's proxy, and whether it was so; what was not measured is not judged."""
    met = {}
    cells: dict[tuple[int, int], dict[str, float]] = {}
    for row in result["table"]:
        cells.setdefault((row["bytes"], row["connections"]), {})[row["name"]] = row["cpu_s"]
    for other, most in (("vllm-router", MOST_OF_VLLM_ROUTER), ("plain aiohttp", MOST_OF_PLAIN)):
        shares = [cell["rlkit"] / cell[other] for cell in cells.values() if other in cell]
        if shares:
            met[f"at most {most} x {other} at every point (worst {max(shares):.2f})"] = max(shares) <= most
    errors = sum(row["errors"] for row in result["table"] if row["name"].startswith("rlkit"))
    met[f"no errors ({errors})"] = errors == 0
    added = next(row["added_ms"] for row in result["latency"] if row["name"] == "rlkit")
    met[f"at most {MOST_ADDED_MS} ms added at one connection ({added:.3f})"] = added <= MOST_ADDED_MS
    crowded = result["crowd"]
    what = f"{IN_FLIGHT} in flight without an error ({crowded['errors']}), below {MOST_MEMORY_MB} MB"
    met[f"{what} ({crowded['peak_mb']:.0f})"] = crowded["errors"] == 0 and crowded["peak_mb"] < MOST_MEMORY_MB
    return met


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    print("CPU seconds per 1,000 requests of the proxy's process; how much of it in the kernel, then requests/s,")
    print("median and p99 latency in ms, errors")
    for row in result["table"]:
        where = f"{row['bytes'] // 1000:4} KB  {row['connections']:5} connections  {row['name']:20}"
        speed = f"{row['requests_per_s']:7.0f}/s  {row['median_ms']:8.1f}  {row['p99_ms']:8.1f}"
        print(f"{where} {row['cpu_s']:7.3f} s {row['kernel_s'] / row['cpu_s']:4.0%}  {speed}  {row['errors']:4}")
    for row in result["latency"]:
        print(f"added at one connection: {row['name']:20} {row['added_ms']:6.3f} ms")
    crowded = result["crowd"]
    print(f"{IN_FLIGHT} in flight: {crowded['name']}, {crowded['peak_mb']:.0f} MB at most, {crowded['errors']} errors")
    for name in result["left_out"]:
        print(f"left out: {name}")
    for what, is_met in result["met"].items():
        print(f"{'met' if is_met else 'NOT MET'}: {what}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when something wanted was not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-router", default=shutil.which("vllm-router"), help="its command, in its own venv")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--connections", type=int, nargs="+", default=list(CONNECTIONS))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", help="names of the proxies to compare")
    options = parser.parse_args(arguments)
    left_out: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machine = stack.enter_context(Machine(folder, options.vllm_router))
        subjects = []
        for subject in SUBJECTS:
            if options.only and subject.name not in options.only:
                continue
            try:
                with machine.running(subject):
                    subjects.append(subject)
            except Missing as problem:
                left_out.append(f"{subject.name}: {problem}")
        result: dict[str, Any] = {"table": table(machine, subjects, options)}
        plain = [subject for subject in subjects if not subject.is_tls]
        result["latency"] = added_latency(machine, plain, options.rounds)
        result["crowd"] = crowd(machine, SUBJECTS[0])
    result["left_out"] = left_out
    result["met"] = verdict(result)
    show(result)
    print(json.dumps(result))
    return 0 if all(result["met"].values()) else 1


def _medians(name: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"name": name, "rounds_cpu_s": [result["cpu_s"] for result in results]}
    for field in ("cpu_s", "kernel_s", "requests_per_s", "median_ms", "p99_ms"):
        row[field] = statistics.median(result[field] for result in results)
    row["errors"] = sum(result["errors"] for result in results)
    return row


def _say(what: str) -> None:
    print(f"\r{what:70}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
