"""Where rollouts went: counted, recorded, and explained by asking the router itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from run_folders import PROXY, run_folder

from rlkit.recipe import Recipe, load_recipe
from rlkit.routing_figures import decisions_over_time, imbalance_over_time
from rlkit.routing_story import (
    Routing,
    explain_blocks,
    explain_decisions,
    headline,
    open_routing,
    prefix_tokens,
    simulated,
    warmed_router,
)

LOCAL = Path(__file__).parents[1] / "runs" / "local.yaml"
TEMPLATE = list(range(8))
# Four prompts of three whole blocks of four tokens; the first two blocks are the template.
PROMPTS = [[*TEMPLATE, *range(100 * n, 100 * n + 6)] for n in range(1, 5)]


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(LOCAL, ["engine=sim", "train.steps=8", "routing.spill_threshold=3"])


def test_every_decision_of_a_simulated_run_is_recorded_as_it_was_counted(recipe: Recipe) -> None:
    found = simulated(recipe)
    assert found.trace is not None
    assert Counter(found.trace["decision"]) == {
        name: found.proxy[name] for name in ("affinity", "spilled", "unmatched") if found.proxy[name]
    }
    per_replica = [replica["routed"] for replica in found.proxy["per_replica"]]
    assert [int((found.trace["replica"] == number).sum()) for number in range(2)] == per_replica
    assert found.trace["in_flight"].max() <= recipe.inflight_limit
    assert found.trace["seconds"].is_monotonic_increasing
    for replica in found.proxy["per_replica"]:
        assert replica["affinity"] + replica["spilled"] + replica["unmatched"] == replica["routed"]


def test_a_run_is_opened_by_its_folder_and_its_counters_are_vllms_own(tmp_path: Path) -> None:
    found = open_routing(str(run_folder(tmp_path / "run").path))
    assert found.trace is None
    assert prefix_tokens(found.proxy) == (300, 1200)
    assert headline(found).startswith("87 % of 6,040 rollouts went to the replica that has served their prompt")
    assert headline(found).endswith("25 % of the prompt tokens were in a KV cache (vLLM's own counters).")


def test_a_recipe_is_simulated_for_a_few_steps() -> None:
    found = open_routing(recipe=str(LOCAL), steps=5, overrides=["routing.policy=round-robin"])
    assert found.recipe.train.steps == 5
    assert "went round robin over 2 replicas" in headline(found)
    assert "(simulated)" in headline(found)


def test_counters_that_are_not_there_are_said_to_be_missing(recipe: Recipe) -> None:
    assert headline(Routing("run", recipe, {}, None)).startswith("No request was routed")
    bare = {**PROXY, "per_replica": [{"routed": 1, "vllm": None}]}
    assert prefix_tokens(bare) == (0, 0)
    assert "KV cache" not in headline(Routing("run", recipe, bare, None))
    for drawn in (decisions_over_time(None), imbalance_over_time(None, 8)):
        assert "recorded of simulated runs only" in drawn.layout.meta["alt"]


def test_blocks_that_prompts_share_decide_nothing_and_their_own_do(recipe: Recipe) -> None:
    router = warmed_router(recipe, PROMPTS[:3], 4)
    known = explain_blocks(router, PROMPTS[0], 4, lambda tokens: " ".join(map(str, tokens)))
    assert known["What it says"].tolist() == [
        "shared by prompts",
        "shared by prompts",
        "decides",
        "2 of 4 tokens: no whole block",
    ]
    assert known["Served by replica"].tolist() == ["0, 1", "0, 1", "0", "none"]
    assert known["Text"][2] == "100 101 102 103"
    assert known["Hash"].nunique() == 4
    new = explain_blocks(router, PROMPTS[3], 4, str)
    assert new["What it says"].tolist()[:3] == ["shared by prompts", "shared by prompts", "nobody has it"]


def test_the_router_says_where_a_request_would_go_and_why(recipe: Recipe) -> None:
    router = warmed_router(recipe, PROMPTS[:3], 4)
    counted = router.counts.routed
    asked = explain_decisions(router, PROMPTS[0], PROMPTS[3], 4)
    assert [words.split(":")[0] for words in asked["Because"]] == [
        "affinity",
        "affinity",
        "spilled",
        "unmatched",
        "unmatched",
    ]
    assert asked["Its replica is ahead by"].tolist() == [0, 3, 4, 0, 0]
    assert asked["Goes to replica"].tolist()[:3] == [0, 0, 1]
    assert router.counts.routed == counted  # asking leaves no trace


def test_figures_over_time_add_up_to_the_run(recipe: Recipe) -> None:
    found = simulated(recipe)
    assert found.trace is not None
    drawn = decisions_over_time(found.trace)
    width = float(found.trace["seconds"].max()) / 60 / 60
    assert sum(float(trace.y.sum()) for trace in drawn.data) * width == pytest.approx(len(found.trace))
    assert f"{len(found.trace):,} rollouts: " in drawn.layout.meta["alt"]
    lead = imbalance_over_time(found.trace, 3)
    assert [trace.name for trace in lead.data] == ["most in the stretch", "mean", "spill_threshold 3"]
    assert max(lead.data[0].y) == found.trace["lead"].max()
