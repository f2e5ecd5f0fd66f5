"""How the routing rule does on a GRPO trace: python tests/bench/routing.py [--thresholds 8 12 16] [--json]

No sockets, no clock: the router itself, and rollouts that take as long as their completions are. A hit is a rollout on
a replica that has served its prompt under the same adapter before; the first of every group cannot be one. Imbalance is
the difference between the most and the least loaded replica, seen at every decision.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rlkit.serving.prefix_index import prefix_chain
from rlkit.serving.prompt_blocks import token_blocks
from rlkit.serving.router import DECISIONS, Policy, Routed, Router

# The published experiment: prompts, rollouts of each, its chat template, and prompts of 103 and 135 tokens with it.
PROMPTS = 1460
GROUP = 8
TEMPLATE_TOKENS = 23
MEDIAN_PROBLEM_TOKENS = 95
BLOCK_SIZE = 16

# Its completions: 1,080 tokens on average and 3,000 at most. Only their spread matters here.
MEDIAN_COMPLETION_TOKENS = 850
MAX_COMPLETION_TOKENS = 3000

# A new adapter every 4 steps of 128 samples, in the middle of a group: a sync waits for none.
SAMPLES_PER_VERSION = 512
VERSION_SHIFT = 3

REPLICAS = 4
WANTED_HITS = 0.872
WANTED_P99 = 14


@dataclass(frozen=True)
class Outcome:
    """How one trace went: shares of the rollouts, and requests of imbalance."""

    hits: float
    possible: float
    affinity: float
    spilled: float
    unmatched: float
    p99_imbalance: float
    mean_imbalance: float


def problems(dice: random.Random) -> list[list[int]]:
    """Token ids of all prompts: the template, then the problem."""
    template = list(range(TEMPLATE_TOKENS))
    return [
        template + [dice.randrange(1000, 150_000) for _ in range(_spread(dice, MEDIAN_PROBLEM_TOKENS, 10, 1000))]
        for _ in range(PROMPTS)
    ]


def rollouts(dice: random.Random) -> Iterator[tuple[int, int]]:
    """Prompt and completion length of every rollout, in the order they are admitted: group after group."""
    for prompt in dice.sample(range(PROMPTS), PROMPTS):
        for _ in range(GROUP):
            yield prompt, _spread(dice, MEDIAN_COMPLETION_TOKENS, 20, MAX_COMPLETION_TOKENS)


def run(threshold: int, in_flight: int, seed: int, policy: Policy = "prefix") -> Outcome:
    """One epoch with this many rollouts in flight."""
    dice = random.Random(seed)
    prompts = [token_blocks(prompt, BLOCK_SIZE) for prompt in problems(dice)]
    router = Router(REPLICAS, threshold, policy)
    for replica in range(REPLICAS):
        router.set_routable(replica, True)
    running: list[tuple[int, int, Routed]] = []  # when it ends, a number for ties, its place
    served: set[tuple[int, str, int]] = set()
    imbalance = []
    hits = now = 0
    for number, (prompt, tokens) in enumerate(rollouts(dice)):
        while len(running) >= in_flight:
            now, _, ended = heapq.heappop(running)
            router.release(ended)
        adapter = f"trl-policy-v{(number + VERSION_SHIFT) // SAMPLES_PER_VERSION}"
        routed = router.route_chain(adapter, prefix_chain(adapter, prompts[prompt]))
        assert routed is not None
        heapq.heappush(running, (now + tokens, number, routed))
        hits += (routed.replica, adapter, prompt) in served
        served.add((routed.replica, adapter, prompt))
        imbalance.append(max(router.in_flight) - min(router.in_flight))
    total = PROMPTS * GROUP
    shares = {decision: router.counts.of(decision) / total for decision in DECISIONS}
    return Outcome(
        hits=hits / total,
        possible=1 - len({(adapter, prompt) for _, adapter, prompt in served}) / total,
        affinity=shares["affinity"],
        spilled=shares["spilled"],
        unmatched=shares["unmatched"],
        p99_imbalance=statistics.quantiles(imbalance, n=100)[98],
        mean_imbalance=statistics.fmean(imbalance),
    )


def median(outcomes: Sequence[Outcome]) -> Outcome:
    """Field by field."""
    rows = [asdict(outcome) for outcome in outcomes]
    return Outcome(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


def _spread(dice: random.Random, middle: float, low: int, high: int) -> int:
    return max(low, min(high, round(dice.lognormvariate(0, 0.7) * middle)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the traces; exit code 1 when the recipe's default misses what is wanted."""
    from rlkit.recipe import RoutingSection

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thresholds", type=int, nargs="+", default=[4, 8, 10, 12, 14, 16, 24, 32])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    default = RoutingSection().spill_threshold
    rows = []
    for in_flight in options.in_flight:
        for threshold in sorted({*options.thresholds, default}):
            outcome = median([run(threshold, in_flight, seed) for seed in range(options.seeds)])
            rows.append({"in_flight": in_flight, "threshold": threshold, **asdict(outcome)})
    kept = [row for row in rows if row["threshold"] == default]
    met = all(row["hits"] >= WANTED_HITS and row["p99_imbalance"] <= WANTED_P99 for row in kept)
    if options.json:
        print(json.dumps({"rows": rows, "default": default, "met": met}))
        return 0 if met else 1
    print(f"{PROMPTS} prompts x {GROUP}, {REPLICAS} replicas, medians of {options.seeds} traces; * the default")
    print("in flight  threshold   hits  possible  affinity  spilled  unmatched  p99 imbalance  mean")
    for row in rows:
        mark = "*" if row["threshold"] == default else " "
        shares = [f"{100 * row[name]:6.2f} %" for name in ("hits", "possible", "affinity", "spilled", "unmatched")]
        print(f"{row['in_flight']:9}  {row['threshold']:8}{mark} {'  '.join(shares)}", end="")
        print(f"  {row['p99_imbalance']:6.1f}  {row['mean_imbalance']:8.1f}")
    print(f"wanted of the default: hits >= {100 * WANTED_HITS:.1f} %, p99 imbalance <= {WANTED_P99}: {met}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
