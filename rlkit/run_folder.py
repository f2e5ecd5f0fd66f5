"""The folder one run leaves behind: `runs/out/<name>/`, and what is where in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# Where runs go and are looked for by their names, seen from where a command is given.
RUNS = Path("runs/out")


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of one run. Nothing here touches the disk."""

    path: Path
    shared_at: Path | None = None  # where `shared` lies when it is not in the folder: a mounted bucket

    @classmethod
    def at(cls, path: str) -> RunFolder:
        """The folder at a path that is given as text."""
        return cls(Path(path))

    @property
    def name(self) -> str:
        """The run's name in trackio: the folder's own, also where it is given as `.`."""
        return os.path.basename(os.path.abspath(self.path))

    @property
    def recipe(self) -> Path:
        """The complete recipe (YAML) the run was started with."""
        return self.path / "recipe.yaml"

    @property
    def state(self) -> Path:
        """Who runs here and how it ended (JSON); its lock refuses a second start."""
        return self.path / "state.json"

    @property
    def logs(self) -> Path:
        """One log file per job: trainer.log, proxy.log, replica-0.log, ..."""
        return self.path / "logs"

    @property
    def engine_log(self) -> Path:
        """What the engine of a run started in the background says; hidden, for it is there before there is a run."""
        return self.path / ".engine.log"

    @property
    def shared(self) -> Path:
        """What stands in for the bucket: checkpoints and `.vllm_lora/` adapters, as TRL's output_dir."""
        return self.shared_at or self.path / "shared"

    @property
    def steps(self) -> Path:
        """One JSON line per logged step, written by the trainer as it goes; what progress bars follow."""
        return self.path / "steps.jsonl"

    @property
    def cap(self) -> Path:
        """One JSON line per decision of the admission cap: time, cap, reason, and what the servers said."""
        return self.path / "cap.jsonl"

    @property
    def control(self) -> Path:
        """What a person asked of the run while it goes on (JSON), see `rlkit.admission.asked`."""
        return self.path / "control.json"

    @property
    def evaluation(self) -> Path:
        """Greedy accuracy on prompts never trained on, before and after (JSON), where the task has such prompts."""
        return self.path / "evaluation.json"

    @property
    def adapter(self) -> Path:
        """The final adapter (peft's layout)."""
        return self.path / "adapter"

    @property
    def metrics(self) -> Path:
        """The run's tidy frame (parquet), as `rlkit.tracking` reads it from trackio."""
        return self.path / "metrics.parquet"

    @property
    def verdict(self) -> Path:
        """`Verdict` as JSON."""
        return self.path / "verdict.json"

    @property
    def proxy(self) -> Path:
        """Routing and load counters of the proxy, with each replica's own vLLM counters, as JSON."""
        return self.path / "proxy.json"

    @property
    def report(self) -> Path:
        """The rendered report, one self-contained HTML file; report.json beside it says the same for machines."""
        return self.path / "report.html"


def free_folder(under: Path, name: str, taken: Collection[str] = ()) -> Path:
    """The first of `name`, `name-2`, ... for a new run that is no folder yet, and whose name is not taken."""
    names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
    return next(under / free for free in names if free not in taken and not (under / free).exists())
