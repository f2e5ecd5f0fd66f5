"""CPU seconds of the simulator: python tests/bench/predictions.py [--predictions 200] [--json]

Predictions of 100 steps of the published chase's fastest recipe, each with a seed of its own, on this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from rlkit import machine
from rlkit.recipe import load_recipe
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate

RECIPE = Path(__file__).parents[2] / "runs" / "published" / "r1-dp3-inflight384.yaml"
STEPS = 100
WANTED_S = 600


def predict(seed: int) -> float:
    """CPU seconds of one prediction."""
    began = time.process_time()
    simulate(replace(setup_of(load_recipe(RECIPE)), steps=STEPS), seed)
    return time.process_time() - began


def main() -> None:
    """Predict, and print how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--predictions", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(machine.cores(), mp_context=get_context("spawn")) as pool:
        cpu = list(pool.map(predict, range(arguments.predictions)))
    took = {
        "predictions": arguments.predictions,
        "steps": STEPS,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s_each": round(sum(cpu) / len(cpu), 2),
        "cores": machine.cores(),
        "wanted_seconds_for_200": WANTED_S,
    }
    if arguments.json:
        print(json.dumps(took, indent=2))
    else:
        print("  ".join(f"{name} {value}" for name, value in took.items()))


if __name__ == "__main__":
    main()
