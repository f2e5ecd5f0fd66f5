"""`rlkit stop` and `rlkit cap`: what can be done to a run that goes on, from another terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit import terminal
from rlkit.errors import BadInput, RunFailed

if TYPE_CHECKING:
    from rlkit.run_folder import RunFolder

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder, such as runs/out/local.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Jobs get 3 s on this machine to end by themselves, rented ones are cancelled one by one over the network.
STOPPED_WITHIN_S = 120.0


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(stop)
    app.command()(cap)


def stop(
    folder: Folder,
    wait: Annotated[bool, typer.Option(help="Wait until its jobs have ended.")] = True,
    as_json: AsJson = False,
) -> None:
    """End a run that goes on, as Ctrl-C would; `rlkit run FOLDER` resumes it."""
    import psutil

    from rlkit.engines.state import is_going_on, state_in_words
    from rlkit.engines.stopping import ask_to_stop

    run = _run(folder)
    pid = ask_to_stop(run)
    if wait:
        try:
            psutil.Process(pid).wait(STOPPED_WITHIN_S)
        except psutil.NoSuchProcess:
            pass
        except psutil.TimeoutExpired:
            raise RunFailed(f"{folder}: process {pid} still stops its jobs after {STOPPED_WITHIN_S:.0f} s") from None
    if as_json:
        terminal.print_json({"folder": str(folder), "pid": pid, "stopped": not is_going_on(run)})
    elif wait:
        terminal.say(f"{folder}: {state_in_words(run)}; `rlkit run {folder}` resumes it")
    else:
        terminal.say(f"{folder}: process {pid} was asked to stop")


def cap(
    folder: Folder,
    most: Annotated[str, typer.Argument(metavar="N|auto", help="The most in flight, or auto: the recipe's own cap.")],
    as_json: AsJson = False,
) -> None:
    """Admit at most N rollouts at once in a local run that goes on; `auto` lifts that again."""
    from rlkit.admission.asked import ask
    from rlkit.engines.state import is_going_on, state_in_words
    from rlkit.recipe import load_recipe

    try:
        limit = None if most == "auto" else int(most)
    except ValueError:
        raise BadInput(f"{most!r}: give a whole number of rollouts, or auto") from None
    run = _run(folder)
    if not is_going_on(run):
        raise BadInput(f"{folder}: no run whose cap could be changed, {state_in_words(run)}")
    ask(run.control, limit, load_recipe(run.recipe))
    if as_json:
        terminal.print_json({"folder": str(folder), "max_inflight": limit})
    elif limit is None:
        terminal.say("the recipe's own cap is in force from the next reading of the servers on")
    else:
        terminal.say(f"at most {limit} rollouts are admitted from the next reading of the servers on")


def _run(folder: Path) -> RunFolder:
    from rlkit.run_folder import RunFolder

    run = RunFolder(folder)
    if not run.recipe.is_file():
        raise BadInput(f"{folder}: holds no run; name its folder, such as runs/out/local")
    return run
