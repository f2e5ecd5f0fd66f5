"""The Jobs of this program on the Hub, as rows for a table: found by label, from any machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from huggingface_hub import JobInfo

from rlkit.engines.hf_money import job_cost
from rlkit.engines.hf_watch import phase_of


@dataclass(frozen=True)
class JobRow:
    """One Job: `minutes` it ran, `usd` it cost so far (None without a price)."""

    run: str
    name: str
    stage: str
    flavor: str
    minutes: float
    usd: float | None
    id: str
    url: str
    alive: bool

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON types."""
        return asdict(self)


def job_rows(jobs: Iterable[JobInfo], prices: Mapping[str, float]) -> list[JobRow]:
    """One row a Job, in the order given."""
    return [_row(job, prices) for job in jobs]


def total_usd(rows: Iterable[JobRow]) -> float:
    """Dollars all of them have cost so far."""
    return sum(row.usd or 0.0 for row in rows)


def _row(job: JobInfo, prices: Mapping[str, float]) -> JobRow:
    labels = job.labels or {}
    role, replica = labels.get("role", "?"), labels.get("replica")
    stage = str(getattr(job.status.stage, "value", job.status.stage))
    seconds = (job.durations.running_secs if job.durations else None) or 0
    return JobRow(
        run=labels.get("run", "?"),
        name=role if replica is None else f"{role}-{replica}",
        stage=stage,
        flavor=str(getattr(job.flavor, "value", job.flavor)),
        minutes=round(seconds / 60, 1),
        usd=job_cost(job, prices),
        id=job.id,
        url=job.url,
        alive=phase_of(stage) != "ended",
    )
