"""Where rollouts went and why: a run's counters, the decisions of a simulated one, and one request block by block.

What decides is asked itself: the router (`rlkit.serving.router`) and its index, on a router that has served what is
told of it. Pure, but for `open_routing`, which reads a run's folder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlkit.engines.sim import proxy_counters
from rlkit.past_run import open_past_run
from rlkit.recipe import Recipe, load_recipe
from rlkit.serving.prefix_index import DIGEST_BYTES, prefix_chain
from rlkit.serving.prompt_blocks import token_blocks
from rlkit.serving.router import Routed, Router
from rlkit.simulation.recipes import translate
from rlkit.simulation.simulate import simulate
from rlkit.wording import percent

# Adapters as TRL names them; a request under another one finds nothing of this one's cache.
ADAPTER, NEXT_ADAPTER = "trl-policy-v3", "trl-policy-v4"


@dataclass(frozen=True)
class Routing:
    """A run's routing. `trace` has a row a routed rollout, None where nobody recorded them (a real run)."""

    name: str
    recipe: Recipe
    proxy: dict[str, Any]  # as proxy.json
    trace: pd.DataFrame | None


def open_routing(folder: str = "", recipe: str = "", steps: int = 40, overrides: Sequence[str] = ()) -> Routing:
    """A run by its folder, else a recipe's simulated here for so many steps. Raises BadInput."""
    if folder:
        past = open_past_run(folder=folder)
        return Routing(past.name, past.recipe or load_recipe(Path(folder) / "recipe.yaml"), past.proxy, None)
    plan = load_recipe(recipe, ["engine=sim", *overrides])
    short = plan.with_overrides([f"train.steps={min(steps, plan.train.steps)}"])
    return simulated(short)


def simulated(recipe: Recipe) -> Routing:
    """A recipe's simulated run with each decision: `seconds`, `replica`, `decision`, `lead`, and what is in flight.

    `lead` is how many requests the busiest replica is ahead of the least loaded one after it. Raises BadInput.
    """
    rows: list[tuple[float, int, str, int, int]] = []

    def note(seconds: float, routed: Routed, in_flight: list[int]) -> None:
        lead = max(in_flight) - min(in_flight)
        rows.append((seconds, routed.replica, routed.decision, lead, sum(in_flight)))

    run = simulate(translate(recipe).setup, recipe.train.seed, on_routed=note)
    trace = pd.DataFrame(rows, columns=["seconds", "replica", "decision", "lead", "in_flight"])
    return Routing(recipe.name, recipe, proxy_counters(run), trace)


def headline(routing: Routing) -> str:
    """Where the rollouts went, in a sentence."""
    proxy, total = routing.proxy, routing.proxy.get("routed", 0)
    if not total:
        return "No request was routed: the run's folder has no counters of a proxy."
    hits, queries = prefix_tokens(proxy)
    found = f"; {percent(hits / queries)} of the prompt tokens were in a KV cache" if queries else ""
    source = "simulated" if routing.recipe.engine == "sim" else "vLLM's own counters"
    cached = f"{found} ({source})" if found else ""
    if proxy.get("round_robin"):
        return f"{total:,} rollouts went round robin over {len(proxy['per_replica'])} replicas{cached}."
    return (
        f"{percent(proxy.get('affinity', 0) / total)} of {total:,} rollouts went to the replica that has served their"
        f" prompt, {percent(proxy.get('spilled', 0) / total)} were spilled to a less loaded one, and"
        f" {percent(proxy.get('unmatched', 0) / total)} were the first of their prompt{cached}."
    )


def prefix_tokens(proxy: Mapping[str, Any]) -> tuple[float, float]:
    """Prompt tokens found in the KV caches and looked for there while the proxy ran, over all replicas; 0: unknown."""

    def counted(replica: Mapping[str, Any], name: str) -> float:
        after, before = (replica.get("vllm") or {}).get(name), (replica.get("vllm_before") or {}).get(name)
        return 0.0 if after is None else float(after) - float(before or 0)

    replicas = proxy.get("per_replica", [])
    return (
        sum(counted(replica, "prefix_hits_total") for replica in replicas),
        sum(counted(replica, "prefix_queries_total") for replica in replicas),
    )


def warmed_router(recipe: Recipe, prompts: Sequence[Sequence[int]], size: int) -> Router:
    """A router that has served each of these prompts once, under `ADAPTER`, with nothing in flight any more."""
    router = Router(recipe.serve.replicas, recipe.routing.spill_threshold, recipe.routing.policy)
    for replica in range(recipe.serve.replicas):
        router.set_routable(replica, True)
    for prompt in prompts:
        routed = router.route(ADAPTER, token_blocks(prompt, size))
        assert routed is not None  # all of them are routable
        router.release(routed)
    return router


def explain_blocks(
    router: Router, tokens: Sequence[int], size: int, text: Callable[[Sequence[int]], str]
) -> pd.DataFrame:
    """A prompt block by block, as the router's index has it: who has served it so far, and whether that decides.

    A block that all replicas have served, or after which prompts went on differently, is what every prompt begins with:
    it draws nobody to one replica. Blocks behind it do.
    """
    blocks = token_blocks(tokens, size)
    chain = prefix_chain(ADAPTER, blocks)
    candidates = sum(1 << replica for replica in router.routable)
    rows = []
    for number in range(1, len(blocks) + 1):
        path = router.index.find(ADAPTER, chain[: number * DIGEST_BYTES])
        known = path.known_blocks >= number
        owners = path.runs[-1].owners if known else 0
        served = [str(replica) for replica in router.routable if owners >> replica & 1]
        decides = known and router.index.specific(path, candidates) != 0
        what = "decides" if decides else "shared by prompts" if known else "nobody has it"
        part = tokens[(number - 1) * size : number * size]
        rows.append(
            (number, text(part), chain[(number - 1) * DIGEST_BYTES :][:4].hex(), ", ".join(served) or "none", what)
        )
    rest = len(tokens) % size
    if rest:
        rows.append((len(blocks) + 1, text(tokens[-rest:]), "", "none", f"{rest} of {size} tokens: no whole block"))
    return pd.DataFrame(rows, columns=["Block", "Text", "Hash", "Served by replica", "What it says"])


def explain_decisions(router: Router, known: Sequence[int], new: Sequence[int], size: int) -> pd.DataFrame:
    """What would be decided now for a prompt that was served and one that was not, by how busy its replica is.

    Each row asks a copy of the router; nothing is recorded.
    """
    blocks = token_blocks(known, size)
    threshold = router.spill_threshold
    home = _asked(router, ADAPTER, blocks, 0, None)
    rows = [
        ("served before", ADAPTER, lead, *_words(_asked(router, ADAPTER, blocks, lead, home.replica)))
        for lead in (0, threshold, threshold + 1)
    ]
    rows.append(("served before", NEXT_ADAPTER, 0, *_words(_asked(router, NEXT_ADAPTER, blocks, 0, None))))
    rows.append(("new", ADAPTER, 0, *_words(_asked(router, ADAPTER, token_blocks(new, size), 0, None))))
    return pd.DataFrame(rows, columns=["Prompt", "Adapter", "Its replica is ahead by", "Goes to replica", "Because"])


_BECAUSE = {
    "affinity": "affinity: the replica has served this prompt",
    "spilled": "spilled: the one that has is too far ahead",
    "unmatched": "unmatched: nobody has served it under this adapter, the least loaded gets it",
    "round-robin": "round robin: it is this replica's turn",
}


def _asked(router: Router, adapter: str, blocks: Sequence[bytes], lead: int, home: int | None) -> Routed:
    asked = copy.deepcopy(router)
    if home is not None:
        asked.in_flight[home] += lead
    routed = asked.route(adapter, blocks)
    assert routed is not None  # all replicas are routable
    return routed


def _words(routed: Routed) -> tuple[int, str]:
    return routed.replica, _BECAUSE[routed.decision]


def toy_prompts(count: int) -> tuple[list[list[int]], Callable[[Sequence[int]], str]]:
    """Token ids of the toy task's first prompts with their chat template, and what turns ids back into text.

    Takes seconds: the tokenizer is built as for the toy model, and TRL is imported for the template.
    """
    from rlkit.training.toy_model import build_tokenizer
    from rlkit.training.toy_task import split_problems

    tokenizer = build_tokenizer()
    problems, _ = split_problems()
    prompts = [
        list(tokenizer.apply_chat_template(problem.prompt(), add_generation_prompt=True, return_dict=False))
        for problem in problems[:count]
    ]
    return prompts, lambda tokens: str(tokenizer.decode(list(tokens)))
