"""`rlkit stop` and `rlkit cap`: what can be done to a run that goes on, from another terminal."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from rlkit import terminal
from rlkit.errors import BadInput, RunFailed
from rlkit.run_name import RUN, folder_of

RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Jobs get 3 s on this machine to end by themselves, rented ones are cancelled one by one over the network.
STOPPED_WITHIN_S = 120.0


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(stop)
    app.command(context_settings={"ignore_unknown_options": True})(cap)  # -3 is a wrong number, not an option


def stop(
    subject: RunName,
    wait: Annotated[bool, typer.Option(help="Wait until its jobs have ended.")] = True,
    as_json: AsJson = False,
) -> None:
    """End a run that goes on, as Ctrl-C would; `rlkit run RUN` resumes it."""
    import psutil

    from rlkit.engines.state import is_going_on, state_in_words
    from rlkit.engines.stopping import ask_to_stop

    run = folder_of(subject)
    folder = run.path
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
        terminal.say(f"{folder}: {state_in_words(run)}; `rlkit run {shlex.quote(str(folder))}` resumes it")
    else:
        terminal.say(f"{folder}: process {pid} was asked to stop")


def cap(
    subject: RunName,
    most: Annotated[str, typer.Argument(metavar="N|auto", help="The most in flight, or auto: the recipe's own cap.")],
    as_json: AsJson = False,
) -> None:
    """Admit at most N rollouts at once in a local run that goes on; `auto` lifts that again."""
    from rlkit.admission.asked import ask
    from rlkit.engines.state import is_going_on, state_in_words
    from rlkit.recipe import load_recipe

    if most != "auto" and not most.isdecimal():
        raise BadInput(f"{most!r}: give a whole number of rollouts, 1 or more, or auto")
    limit = None if most == "auto" else int(most)
    run = folder_of(subject)
    folder = run.path
    if not is_going_on(run):
        raise BadInput(f"{folder}: no run whose cap could be changed, {state_in_words(run)}")
    ask(run.control, limit, load_recipe(run.recipe))
    if as_json:
        terminal.print_json({"folder": str(folder), "max_inflight": limit})
    elif limit is None:
        terminal.say("the recipe's own cap is in force from the next reading of the servers on")
    else:
        terminal.say(f"at most {limit} rollouts are admitted from the next reading of the servers on")
