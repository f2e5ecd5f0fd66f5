"""A look at the served policy: greedy answers to prompts it never trained on."""

from __future__ import annotations

from typing import Any

import httpx

from rlkit.recipe import Recipe
from rlkit.training.rewards import load_reward

TIMEOUT_S = 300.0


def greedy_accuracy(server_url: str, model: str, tokenizer: Any, rows: list[dict[str, Any]], recipe: Recipe) -> float:
    """Mean reward of one greedy completion per row, from `model` as the servers hold it. Raises httpx.HTTPError."""
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows
    ]
    limit = recipe.sampling.max_completion_length
    body = {"model": model, "prompt": prompts, "max_tokens": limit, "temperature": 0, "return_token_ids": True}
    response = httpx.post(f"{server_url}/v1/completions", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    reward = load_reward(recipe.reward, limit)
    scores = reward(
        prompts=[row["prompt"] for row in rows],
        completions=[[{"role": "assistant", "content": choice["text"]}] for choice in choices],
        completion_ids=[choice["token_ids"] for choice in choices],
        answer=[row["answer"] for row in rows],
    )
    return sum(score or 0.0 for score in scores) / len(scores)
