"""Where the jobs of a recipe execute.

base.py    what an engine is: Event, Outcome        local.py         processes on this machine
jobs.py    one process with its log                 guard.py         ends the jobs when the engine is killed
lock.py    one engine per run folder                state.py         whether the run goes on, or how it ended
stopping.py  how a run is ended from outside      background.py  a run started beside a notebook's kernel
memory.py  how much the jobs took together          parent_watch.py  ends a process when its parent is gone
checkpoint.py  what a run in a folder resumes from
step_lines.py  the steps that a trainer adds to its file, copied where it is elsewhere
waiting.py  what is said while the replicas start
receivers.py  beside the replicas of a local run that pushes its adapters
sim.py     no processes: the simulator in the place of all jobs

hf.py          Jobs on Hugging Face, from start to end        hf_jobs.py     what each Job is asked for
hf_fleet.py    the Jobs of one run, held together            hf_addresses.py where its replicas are
hf_watch.py    what the Jobs' stages and answers mean         hf_money.py    prices, costs, budget and deadline
hf_hub.py      the Hub's client, with retries                 hf_wheel.py    this code as a wheel
hf_replica.py  what runs in a replica's Job                   hf_lease.py    what ends a replica nobody needs
hf_trainer.py  what runs in the trainer's Job                 hf_records.py  a run's files between Job and bucket
hf_delivery.py what goes into the bucket and comes back       hf_recovery.py when a run goes on after a loss
hf_list.py     the Jobs of all runs as rows                 hf_predict.py  how long a step will take
hf_measure.py  two cheap Jobs that try mount and port         hf_probe.py    what runs in them
hf_figures.py  what they say of a recipe                    hf_measured.py keeps it for the next runs
hf_token.py    what a receiver is asked with                hf_child.py    a process inside a Job
hf_offer.py    what a recipe would cost                       hf_purse.py    several runs within one total
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from rlkit.engines.base import Confirm, Event, OnEvent, Outcome, agree
from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder

if TYPE_CHECKING:
    from rlkit.preflight import Finding

__all__ = ["LAUNCHERS", "Event", "OnEvent", "Outcome", "engine_problem", "launch"]

# The engines that can run, each with the function that executes a recipe there; imported when it is called.
LAUNCHERS = {
    "local": "rlkit.engines.local:launch_local",
    "sim": "rlkit.engines.sim:launch_sim",
    "hf": "rlkit.engines.hf:launch_hf",
}


def engine_problem(engine: str) -> str | None:
    """Why nothing can be launched on `engine`, as a clause that follows the field's name; None if it can."""
    return None if engine in LAUNCHERS else f"{engine} cannot run yet"


def launch(
    recipe: Recipe,
    folder: RunFolder,
    on_event: OnEvent = lambda event: None,
    findings: Iterable[Finding] | None = None,
    confirm: Confirm = agree,
) -> Outcome:
    """Execute `recipe` on its engine and return when it is done; `confirm` is asked before hardware is rented.

    An error among preflight's `findings` stops here (None: preflight has not looked yet and does it now). The same
    folder again resumes its run. Raises BadInput before anything starts, RunFailed with the log's last lines after.
    """
    if findings is None:
        from rlkit import preflight  # it asks this module which engines there are

        findings = preflight.check(recipe, preflight.gather_facts(recipe, folder.path))
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise BadInput("; ".join(errors))
    module, _, name = LAUNCHERS[recipe.engine].partition(":")
    launcher: Callable[[Recipe, RunFolder, OnEvent, Confirm], Outcome] = getattr(import_module(module), name)
    return launcher(recipe, folder, on_event, confirm)
