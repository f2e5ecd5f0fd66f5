"""A set-up that is simulated in a tenth of a second: two engines, short answers, steps of sixteen samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlkit.simulation.lengths import Lengths
from rlkit.simulation.replica import Capacity, Rates
from rlkit.simulation.setup import Engine, Setup, SyncSetup, TrainerSetup

RATES = Rates(base_s=0.01, sequence_s=1e-4, token_s=1e-7, prefill_token_s=1e-5)
ROOMY = Capacity(kv_tokens=100_000)
TIGHT = Capacity(kv_tokens=2_000)


def small_setup(**changes: Any) -> Setup:
    """Generation keeps up with the trainer; nothing is short of cache."""
    setup = Setup(
        steps=12,
        engines=(Engine(0, ROOMY, RATES), Engine(1, ROOMY, RATES)),
        lengths=Lengths(100.0, 100.0, 400, 0.3, 0.3, prompts=50, prompt_tokens=60, prompt_deviation=10.0),
        trainer=TrainerSetup(
            gradient_accumulation_steps=16, row_s=0.05, row_token_s=1e-5, optimizer_s=0.01, recompute_share=0.2
        ),
        sync=SyncSetup(kind="push", interval=1, pause_s=0.02, save_s=0.02, push_s=0.01, max_loras=10),
        num_generations=4,
        max_inflight=32,
        max_model_len=512,
        max_staleness=8,
        queue_maxsize=32,
        score_s=0.01,
    )
    return replace(setup, **changes)


def engines(*capacities: Capacity) -> tuple[Engine, ...]:
    """One server each."""
    return tuple(Engine(server, capacity, RATES) for server, capacity in enumerate(capacities))
