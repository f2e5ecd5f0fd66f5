"""Where every second of a run went, the trainer's and the replicas', in seconds and dollars.

Device seconds: a step of 5 s on two ranks is 10. The entries of a side add up to all of its time: the last of them is
what the log does not explain. Nothing is set aside: the warm-up was paid for, too.

The replicas are paid for as long as the trainer runs. A sync stops them; the rest of their time is split by what became
of the rollouts: the part of the in-flight limit that is not in the servers (held back by a full queue, or by a lack of
connections), recomputation after preemptions, samples thrown away as stale, and those that were trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from rlkit.errors import RlkitError
from rlkit.recipe import Recipe
from rlkit.rollout_signals import without_clears
from rlkit.rows import in_order
from rlkit.signals import column, row_interval
from rlkit.simulation.recipes import setup_of

# A preempted rollout is young more often than not, and half of an average one is the most that is to be expected of it.
RECOMPUTED_PART = 0.5


@dataclass(frozen=True)
class Entry:
    """One use of one side's time: device seconds, the part of that side's time, dollars (None: no price is known)."""

    side: str  # trainer, replicas
    use: str
    seconds: float
    share: float
    usd: float | None


def waste_ledger(frame: pd.DataFrame, recipe: Recipe) -> list[Entry]:
    """The entries of both sides, each side's adding up to all of its seconds; none for a run without timed steps.

    Dollars follow `hardware.usd_per_hour`, divided among trainer ranks and replicas alike.
    """
    frame = in_order(frame)
    every = row_interval(frame)
    totals = _Totals(frame, every, recipe)
    if totals.wall_s <= 0:
        return []
    ranks = recipe.train.processes
    engines = recipe.serve.engines
    price = recipe.hardware.usd_per_hour
    usd_s = None if price is None else price / 3600 / (ranks + engines)
    trainer = _fill(
        {name: seconds * ranks for name, seconds in totals.trainer().items()}, totals.wall_s * ranks, "other"
    )
    replicas = _fill(
        {name: seconds * engines for name, seconds in totals.replicas(engines).items()},
        totals.wall_s * engines,
        "trained",
    )
    return [*_entries("trainer", trainer, usd_s), *_entries("replicas", replicas, usd_s)]


def ledger_frame(entries: list[Entry]) -> pd.DataFrame:
    """The ledger as a table: side, use, seconds, share, usd."""
    return pd.DataFrame(
        [(entry.side, entry.use, entry.seconds, entry.share, entry.usd) for entry in entries],
        columns=["side", "use", "seconds", "share", "usd"],
    )


def wall_clock_s(frame: pd.DataFrame) -> float:
    """Seconds that the logged steps took, 0 when nothing of them was timed."""
    frame = in_order(frame)
    return float(step_seconds(frame).sum()) * row_interval(frame)


def step_seconds(frame: pd.DataFrame) -> pd.Series[float]:
    """Seconds of every logged step.

    The first step of a trainer has no time of its own: its phases, and the sync before it, are all there is.
    """
    step = column(frame, "perf/step_s")
    phases = sum(
        (column(frame, f"perf/{name}_s").fillna(0.0) for name in ("fwd_bwd", "rollout_wait", "optimizer")),
        start=pd.Series(0.0, index=frame.index),
    )
    untimed = phases + column(frame, "perf/weight_sync_s").fillna(0.0)
    return step.fillna(untimed)


class _Totals:
    """Seconds of the whole run, of one device."""

    def __init__(self, frame: pd.DataFrame, every: float, recipe: Recipe) -> None:
        self._frame, self._every, self._recipe = frame, every, recipe
        self._syncs = self._sync_s()
        self.wall_s = wall_clock_s(frame)

    def trainer(self) -> dict[str, float]:
        fwd_bwd, fwd = self._sum("perf/fwd_bwd_s"), self._sum("perf/fwd_s")
        again = min(fwd, fwd_bwd / 2) if self._recipe.train.gradient_checkpointing else 0.0
        return {
            "trained": fwd_bwd - again,
            "forward again": again,
            "waiting": self._sum("perf/rollout_wait_s"),
            "syncing": self._syncs,
            "optimizer": self._sum("perf/optimizer_s"),
        }

    def replicas(self, engines: int) -> dict[str, float]:
        running_s = max(0.0, self.wall_s - self._syncs)
        idle_s = running_s * self._empty()
        again_s = min(running_s - idle_s, self._recomputed_s() / engines)
        useful_s = running_s - idle_s - again_s
        return {
            "syncing": self._syncs,
            "idle": idle_s,
            "recomputed after preemption": again_s,
            "generated and dropped": useful_s * self._dropped(),
        }

    def _empty(self) -> float:
        """The part of the in-flight limit that is in no server; 0 where the servers' figures were not logged."""
        inside = self._mean("rollout/vllm_running_requests") + self._mean("rollout/vllm_queued_requests")
        limit = self._mean("rollout/inflight_cap") or float(self._recipe.inflight_limit)
        if "rollout/vllm_running_requests" not in self._frame or limit <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - inside / limit))

    def _recomputed_s(self) -> float:
        """Engine seconds of prefilling preempted rollouts again; 0 where nothing is known of the hardware."""
        logged = column(self._frame, "rollout/vllm_preemptions_total")
        if not logged.notna().any() or self._recipe.hardware.replica == "cpu":
            return 0.0
        try:
            rates = setup_of(self._recipe).engines[0].rates
        except RlkitError:
            return 0.0
        preempted = without_clears(float(logged.sum()) / max(1, len(self._frame)), self._mean, self._recipe) or 0.0
        tokens = self._mean("sample/forwarded_tokens_mean") or self._mean("completions/mean_length")
        return preempted * len(self._frame) * tokens * RECOMPUTED_PART * rates.prefill_token_s

    def _dropped(self) -> float:
        dropped = float(column(self._frame, "sample/dropped_stale_total").sum())
        trained = self._sum("batch/samples_per_step")
        return dropped / (dropped + trained) if trained > 0 else 0.0

    def _sync_s(self) -> float:
        syncs = column(self._frame, "perf/weight_sync_s")
        if self._every == 1:
            return float(syncs.sum())
        mean = syncs.mean()
        steps = len(self._frame) * self._every
        return 0.0 if pd.isna(mean) else float(mean) * steps / self._recipe.rollout.weight_sync_steps

    def _sum(self, name: str) -> float:
        return float(column(self._frame, name).sum()) * self._every

    def _mean(self, name: str) -> float:
        mean = column(self._frame, name).mean()
        return 0.0 if pd.isna(mean) else float(mean)


def _fill(parts: Mapping[str, float], whole: float, rest: str) -> dict[str, float]:
    """`parts`, and `rest` for what they leave; shrunk to the whole where timers that overlap exceed it."""
    total = sum(parts.values())
    shrink = min(1.0, whole / total) if total > 0 else 1.0
    filled = {name: seconds * shrink for name, seconds in parts.items()}
    return {rest: max(0.0, whole - sum(filled.values()))} | filled


def _entries(side: str, parts: Mapping[str, float], usd_s: float | None) -> list[Entry]:
    whole = sum(parts.values())
    return [
        Entry(side, use, seconds, seconds / whole, None if usd_s is None else seconds * usd_s)
        for use, seconds in sorted(parts.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
