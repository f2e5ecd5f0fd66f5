"""Where the jobs of a recipe execute.

base.py    what an engine is: Event, Outcome        local.py         processes on this machine
jobs.py    one process with its log                 guard.py         ends the jobs when the engine is killed
lock.py    one engine per run folder, and its end   checkpoint.py    what a run in a folder resumes from
memory.py  how much the jobs took together          parent_watch.py  ends a process when its parent is gone
receivers.py  beside the replicas of a local run that pushes its adapters
sim.py     no processes: the simulator in the place of all jobs
"""

from __future__ import annotations

from rlkit import preflight
from rlkit.engines.base import Event, OnEvent, Outcome
from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder

__all__ = ["Event", "OnEvent", "Outcome", "launch"]


def launch(recipe: Recipe, folder: RunFolder, on_event: OnEvent = lambda event: None) -> Outcome:
    """Execute `recipe` on its engine and return when it is done.

    An error of preflight's stops here. The same folder again resumes its run. Raises BadInput before anything starts,
    RunFailed with the log's last lines after.
    """
    findings = preflight.check(recipe, preflight.gather_facts(recipe, folder.path))
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise BadInput("; ".join(errors))
    if recipe.engine == "local":
        from rlkit.engines.local import launch_local

        return launch_local(recipe, folder, on_event)
    if recipe.engine == "sim":
        from rlkit.engines.sim import launch_sim

        return launch_sim(recipe, folder, on_event)
    raise BadInput(f"engine: {recipe.engine!r} cannot run yet; use --engine local or --engine sim")
