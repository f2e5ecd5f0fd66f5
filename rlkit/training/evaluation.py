"""A look at the served policy: greedy answers to prompts it never trained on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from rlkit.recipe import Recipe
from rlkit.serving.replica import DIRECT
from rlkit.training.rewards import load_reward

TIMEOUT_S = 300.0
AT_ONCE = 32  # requests; servers batch them, and a pool of threads stays small


def greedy_accuracy(server_url: str, model: str, tokenizer: Any, rows: list[dict[str, Any]], recipe: Recipe) -> float:
    """Mean reward of one greedy completion per row, from `model` as the servers hold it. Raises httpx.HTTPError."""
    limit = recipe.sampling.max_completion_length

    def complete(row: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        body = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 0, "return_token_ids": True}
        response = client.post("/v1/completions", json=body)
        response.raise_for_status()
        return dict(response.json()["choices"][0])

    # One request a prompt, as rollouts are: the proxy's counters then still agree with the servers' own.
    with (
        httpx.Client(base_url=server_url, timeout=TIMEOUT_S, mounts=DIRECT) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        choices = list(pool.map(complete, rows))
    reward = load_reward(recipe.reward, limit)
    scores = reward(
        prompts=[row["prompt"] for row in rows],
        completions=[[{"role": "assistant", "content": choice["text"]}] for choice in choices],
        completion_ids=[choice["token_ids"] for choice in choices],
        answer=[row["answer"] for row in rows],
    )
    return sum(score or 0.0 for score in scores) / len(scores)
