"""The simulated engine: no process, and the same things left behind as by a run that had some.

The trackio run has TRL's metric names, the recipe as its config, and the simulated wall-clock, beginning now. Rewards
have no physics: a simulated run logs none, and its config says what it is.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from rlkit.engines.base import Confirm, Event, OnEvent, Outcome, agree
from rlkit.engines.checkpoint import claim_folder
from rlkit.engines.lock import RunLock
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.serving.router import DECISIONS
from rlkit.sigterm import sigterm_as_exit
from rlkit.simulation.frame import logged_rows
from rlkit.simulation.recipes import translate
from rlkit.simulation.simulate import Simulation, Step, simulate
from rlkit.tracking import write_run


def launch_sim(
    recipe: Recipe,
    folder: RunFolder,
    on_event: OnEvent,
    confirm: Confirm = agree,
    *,
    stop_after: int | None = None,
) -> Outcome:
    """Simulate `recipe` with its own seed into `folder`; see `rlkit.engines.launch`. There is nothing to ask about.

    `stop_after` steps it is left, as by someone who has seen enough: lengths change as over all of the recipe's steps.
    """
    started = time.monotonic()
    with RunLock(folder) as lock, sigterm_as_exit():
        claim_folder(recipe, folder)
        lock.note("running")
        try:
            translation = translate(recipe)
            for note in translation.extrapolated:
                on_event(Event("log", text=note))
            on_event(Event("phase", text="simulating (no reward: it has no physics)"))

            def tell(step: Step) -> None:
                total = min(recipe.train.steps, stop_after or recipe.train.steps)
                lines.write(json.dumps({"global_step": step.number, **step.metrics}) + "\n")
                lines.flush()  # who watches the run reads them as it goes
                on_event(Event("step", step=step.number, total=total, metrics=dict(step.metrics)))

            with folder.steps.open("w", encoding="utf-8") as lines:
                run = simulate(replace(translation.setup, stop_after=stop_after), recipe.train.seed, tell)
            _leave_behind(recipe, folder, run, list(translation.extrapolated))
        except (KeyboardInterrupt, SystemExit):
            lock.note("stopped")
            raise
        except BaseException as error:
            lock.note("failed", error=str(error))
            raise
        seconds = time.monotonic() - started
        simulated = round(run.seconds, 1)
        lock.note("finished", steps=len(run.steps), seconds=round(seconds, 1), simulated_seconds=simulated)
    return Outcome(folder, len(run.steps), seconds)


def _leave_behind(recipe: Recipe, folder: RunFolder, run: Simulation, notes: list[str]) -> None:
    rows, moments = logged_rows(run, datetime.now(UTC))
    config = {
        "recipe": recipe.to_dict(),
        "versions": {package: metadata.version(package) for package in ("rlkit", "trackio")},
        "limits": {
            "max_inflight_tasks": recipe.inflight_limit,
            "queue_maxsize": recipe.rollout.queue_maxsize,
            "max_staleness": recipe.rollout.max_staleness,
            "weight_sync_steps": recipe.rollout.weight_sync_steps,
            "token_budget": recipe.train.token_budget,
            "replicas": recipe.serve.replicas,
            "num_generations": recipe.sampling.num_generations,
            "peak_flops_per_device": translate(recipe).setup.trainer.peak_flops,
        },
        "simulated": {"seed": recipe.train.seed, "reward": "not simulated", "extrapolated": notes},
    }
    folder.proxy.write_text(json.dumps(proxy_counters(run), indent=2) + "\n", encoding="utf-8")
    if recipe.cap.policy != "none":
        decisions = [json.dumps(decision.to_dict()) for decision in run.decisions]
        folder.cap.write_text("".join(line + "\n" for line in decisions), encoding="utf-8")
    write_run(recipe.tracking.project, folder.name, rows, moments, config)


def proxy_counters(run: Simulation) -> dict[str, Any]:
    """The counters that the proxy would have written (proxy.json)."""
    routing = run.routing
    replicas = []
    for server in range(routing.replicas):
        engines = [engine for engine in run.per_engine if engine["server"] == server]
        counted = {name: round(sum(engine[name] for engine in engines)) for name in engines[0]}
        vllm = {
            "request_success_total": counted["finished"],
            "preemptions_total": counted["preemptions"],
            "prefix_hits_total": counted["cached_tokens"],
            "prefix_queries_total": counted["queried_tokens"],
        }
        replicas.append(
            {
                "routed": routing.on(server),
                **{decision.replace("-", "_"): routing.cells[decision][server] for decision in DECISIONS},
                "completed": counted["finished"],
                "failed": 0,
                "vllm": vllm,
                "vllm_before": None,
            }
        )
    return {
        "routed": routing.routed,
        "affinity": routing.of("affinity"),
        "spilled": routing.of("spilled"),
        "unmatched": routing.of("unmatched"),
        "round_robin": routing.of("round-robin"),
        "per_replica": replicas,
        "adapters": [
            {
                "name": f"trl-policy-v{number}",
                "ok": True,
                "seconds": round(sync.accept_s, 3),
                "attempts": list(sync.attempts),
            }
            for number, sync in enumerate(run.syncs, 1)
            if sync.attempts
        ],
    }
