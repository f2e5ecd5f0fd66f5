"""What the Jobs of a run are doing, judged from what the Hub shows of them: a pure state machine.

Each look is a reading per Job: its stage, the Hub's words, whether its server answered. The law:

* A Job that ended before it should is the run's failure, by name, at once.
* A Job that waits for hardware longer than allowed is a finding that names its flavor.
* A running server that does not answer in time is a failure; one that answered and stops is one after three looks.
* A stage this program does not know is told once and waited out, under the same deadlines: the Hub gains stages, and
  an unknown one says neither that a Job runs nor that it ended.
* A Job that could not be read keeps its last state; the Hub being away does not end a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["waiting", "running", "ended", "unknown"]

# huggingface_hub's TERMINAL_JOB_STAGES; UPDATING is not in its enumeration, but its log reader takes it as running.
_PHASES: dict[str, Phase] = {
    "SCHEDULING": "waiting",
    "RUNNING": "running",
    "UPDATING": "running",
    "COMPLETED": "ended",
    "CANCELED": "ended",
    "ERROR": "ended",
    "DELETED": "ended",
}
# A single unanswered /health is a busy server.
UNHEALTHY_AFTER = 3


def phase_of(stage: str) -> Phase:
    """What a stage means for a run."""
    return _PHASES.get(str(getattr(stage, "value", stage)).upper(), "unknown")


@dataclass(frozen=True)
class Reading:
    """One look at one Job: `stage` None when it could not be read, `healthy` None when its server was not asked."""

    stage: str | None
    message: str | None = None
    healthy: bool | None = None


@dataclass(frozen=True)
class Limits:
    """Seconds a Job may wait for hardware, and a running server may take until it answers."""

    scheduling_s: float
    ready_s: float


@dataclass(frozen=True)
class Failure:
    """Why the run cannot go on: the Job, and a sentence."""

    job: str
    text: str


@dataclass
class JobWatch:
    """One Job over time; `serves` when it has a /health to answer, `flavor` for the finding."""

    name: str
    flavor: str
    serves: bool
    limits: Limits
    started_at: float
    stage: str = "SCHEDULING"
    ready: bool = False
    _running_since: float | None = None
    _unhealthy: int = 0
    _strange: set[str] = field(default_factory=set)

    @property
    def phase(self) -> Phase:
        """The last known."""
        return phase_of(self.stage)

    @property
    def answers(self) -> bool:
        """Whether its server answered when it was last asked."""
        return self.ready and not self._unhealthy

    def observe(self, now: float, reading: Reading) -> tuple[Failure | None, list[str]]:
        """What this look means: why the run cannot go on, if so, and what to tell."""
        told: list[str] = []
        if reading.stage is not None:
            stage = str(getattr(reading.stage, "value", reading.stage))
            if phase_of(stage) == "unknown" and stage not in self._strange:
                self._strange.add(stage)
                told.append(f"{self.name}: the Hub shows a stage {stage!r} that this version does not know; waiting")
            self.stage = stage
        if self.phase == "ended":
            words = f" ({reading.message})" if reading.message else ""
            return Failure(self.name, f"{self.name} ended in stage {self.stage}{words}"), told
        if self.phase == "running" and self._running_since is None:
            self._running_since = now
            told.append(f"{self.name} is running")
        if self._running_since is None:
            return self._scheduling(now), told
        return self._serving(now, reading), told

    def _scheduling(self, now: float) -> Failure | None:
        if now - self.started_at <= self.limits.scheduling_s:
            return None
        minutes = (now - self.started_at) / 60
        text = (
            f"{self.name} still waits for {self.flavor} after {minutes:.0f} minutes (stage {self.stage}); "
            "choose another flavor, or raise hardware.scheduling_minutes"
        )
        return Failure(self.name, text)

    def _serving(self, now: float, reading: Reading) -> Failure | None:
        if not self.serves or reading.healthy is None:
            return None
        assert self._running_since is not None
        if reading.healthy:
            self.ready, self._unhealthy = True, 0
        elif self.ready:
            self._unhealthy += 1
            if self._unhealthy >= UNHEALTHY_AFTER:
                return Failure(self.name, f"{self.name} no longer answers /health")
        elif now - self._running_since > self.limits.ready_s:
            return Failure(self.name, f"{self.name} runs for {now - self._running_since:.0f} s and does not answer")
        return None


def observe_all(
    watches: Mapping[str, JobWatch], now: float, readings: Mapping[str, Reading]
) -> tuple[list[Failure], list[str]]:
    """One look at all Jobs: every failure, and what to tell."""
    failures: list[Failure] = []
    told: list[str] = []
    for name, reading in readings.items():
        failure, news = watches[name].observe(now, reading)
        told += news
        failures += [failure] if failure else []
    return failures, told


def server_problem(info: Mapping[str, object], rank: int | None, slots: int) -> str | None:
    """What a server's /server_info (config_format=json) says against the recipe, or None.

    `rank` is the adapter's, None without one; `slots` the adapter versions that must fit.
    """
    config = info.get("vllm_config")
    if not isinstance(config, Mapping):
        return "/server_info has no vllm_config"
    parallel = config.get("parallel_config") or {}
    if rank is None:
        return None
    ranks = parallel.get("data_parallel_size", 1)
    if ranks != 1:
        return f"data_parallel_size is {ranks}: a loaded adapter reaches one rank only"
    lora = config.get("lora_config")
    if not isinstance(lora, Mapping):
        return "it serves no adapters (lora_config is missing)"
    if lora.get("max_loras", 0) < slots:
        return f"max_loras is {lora.get('max_loras')}, the recipe needs {slots}"
    if lora.get("max_lora_rank", 0) < rank:
        return f"max_lora_rank is {lora.get('max_lora_rank')}, the adapter has {rank}"
    return None
