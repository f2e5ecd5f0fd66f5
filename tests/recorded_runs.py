"""Two real runs as frames, and the recipe they were made with."""

from pathlib import Path

import pandas as pd

from rlkit.recipe import Recipe, parse_recipe

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> pd.DataFrame:
    """The frame of tests/data/<name>.jsonl in the shape `rlkit.tracking` gives."""
    frame = pd.read_json(DATA / f"{name}.jsonl", lines=True).set_index("global_step")
    start = pd.Timestamp("2026-01-05 12:00", tz="UTC")
    frame["timestamp"] = start + pd.to_timedelta(frame.pop("t"), unit="s")
    return frame


def recipe(**rollout: int) -> Recipe:
    """A recipe with the recorded runs' limits, `rollout` fields changed."""
    limits = {"queue_maxsize": 256, "max_inflight_tasks": 64, "max_staleness": 4} | rollout
    data = {
        "name": "recorded",
        "model": {"name": "toy-arithmetic"},
        "data": {"name": "toy-addition"},
        "reward": "rlkit.training.rewards:toy_sum",
        "train": {"steps": 50, "token_budget": 512, "gradient_accumulation_steps": 4},
        "rollout": limits,
        "serve": {"max_model_len": 128},
        "cap": {"policy": "none"},  # they were made before there was one
        "tracking": {"project": "recorded"},
    }
    return parse_recipe(data, "recorded")
