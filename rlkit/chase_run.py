"""Runs a chase: launches what `rlkit.chase` decides, reads each run back, and keeps the scoreboard on disk.

Everything is written before and after each run, so that the same command goes on where it was stopped: a finished run
is not repeated, and one that was interrupted is resumed as its engine can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlkit.advice import advise
from rlkit.chase import Probe, Scoreboard, Start, Stop, decide
from rlkit.chase_folder import ChaseFolder, with_run
from rlkit.counsel import Counsel, measured_figures
from rlkit.diagnosis import Verdict
from rlkit.engines import OnEvent
from rlkit.engines.base import Confirm, agree
from rlkit.engines.hf_purse import Purse, billed, unbounded
from rlkit.engines.state import has_finished, read_state
from rlkit.errors import BadInput, RlkitError, RunFailed
from rlkit.pace import logged_minutes
from rlkit.price import usd_of, usd_paid
from rlkit.recipe import Recipe, load_recipe
from rlkit.results import keep_metrics, read_run
from rlkit.run_folder import RunFolder
from rlkit.run_once import run_once

# Past the warm-up of any staleness, and enough steps after it that their mean is known within a few percent.
PROBE_STEPS = 60

# What the total of a chase's rented runs is called where it is set.
SPEND = "--spend-usd"

Tell = Callable[[Probe], None]


def chase(
    board: Scoreboard,
    start: Recipe,
    place: ChaseFolder,
    on_event: OnEvent = lambda event: None,
    before: Tell = lambda probe: None,
    after: Tell = lambda probe: None,
    confirm: Confirm | None = None,
    processes: int | None = None,
    spend_usd: float | None = None,
) -> Scoreboard:
    """Go on with a chase until it ends. `before` and `after` are told each run, `confirm` asked before one is rented.

    Its rented runs cost at most `spend_usd` together: one that may cost more than is left ends the chase. Without
    `confirm` nobody is asked, and they need that total. Raises RunFailed or BadInput when the first run cannot be; a
    later one that cannot ends there, and another change is tried.
    """
    if confirm is None or spend_usd is not None:
        rented = {start.name: start} if start.engine == "hf" else {}
        problem = unbounded(rented, f"with --yes up to {board.rules.max_runs} runs", spend_usd, SPEND)
        if problem is not None:
            raise BadInput(problem)
    purse = None if spend_usd is None else _purse(spend_usd, board, place)
    place.save(board)
    while True:
        next_step = decide(board.probes, board.rules)
        if isinstance(next_step, Stop):
            board = replace(board, stopped=next_step.reason)
            place.save(board)
            return board
        if isinstance(next_step, Start):
            probe = place.write_start(start)
        else:
            number = len(board.probes) + 1
            probe = place.write_change(number, next_step.parent, next_step.advice, start)
        refused = None if purse is None else _refusal(purse, probe, place)
        if refused is not None:
            if probe.parent is None:
                raise BadInput(refused)
            board = replace(board, stopped=refused)
            place.save(board)
            return board
        before(probe)
        probe = _measured(probe, board, place, on_event, confirm or agree, processes)
        if purse is not None:
            purse.ended(probe.folder, _billed(probe, place))
        place.write_outcome(probe)
        board = with_run(board, probe)
        place.save(board)
        after(probe)


def _purse(spend_usd: float, board: Scoreboard, place: ChaseFolder) -> Purse:
    """The total, less what the chase's runs were billed before; also the one that an earlier kernel left."""
    purse = Purse(spend_usd, SPEND)
    for probe in board.probes:
        purse.ended(probe.folder, _billed(probe, place))
    begun = place.run(len(board.probes) + 1)
    if begun.state.exists():
        purse.ended(begun.name, billed(load_recipe(begun.recipe), read_state(begun)))
    return purse


def _billed(probe: Probe, place: ChaseFolder) -> float:
    state = read_state(place.run(probe.number))
    # Without a state it was refused before anything was asked of the Hub.
    return billed(load_recipe(place.recipe(probe)), state) if state else 0.0


def _refusal(purse: Purse, probe: Probe, place: ChaseFolder) -> str | None:
    """Why a run may not be paid; None for one that may, that is over, or that costs nothing."""
    recipe = load_recipe(place.recipe(probe))
    if recipe.engine != "hf" or has_finished(place.run(probe.number)):
        return None
    most_usd = recipe.hardware.budget_usd or 0.0
    refused = purse.refusal(probe.folder, most_usd)
    if refused is None:
        purse.start(probe.folder, most_usd)
    return refused


def _measured(
    probe: Probe,
    board: Scoreboard,
    place: ChaseFolder,
    on_event: OnEvent,
    confirm: Confirm,
    processes: int | None,
) -> Probe:
    """The run, executed unless it is there already, with what it showed and the advice after it."""
    recipe = load_recipe(place.recipe(probe))
    short = recipe.with_overrides([f"train.steps={board.probe_steps}"])
    folder = place.run(probe.number)
    refused: list[object] = []

    def ask(price: object) -> bool:
        refused.append(price)  # until it is agreed to: nobody may be there to be asked, which is an error
        if confirm(price):
            refused.clear()
        return not refused

    try:
        verdict = run_once(short, folder, on_event, ask)
    except (RunFailed, BadInput) as error:
        if refused or probe.parent is None:
            raise
        return replace(probe, failure=str(error).splitlines()[0])
    except (KeyboardInterrupt, SystemExit):
        keep_metrics(short, folder)
        raise
    return _judged(probe, recipe, short, folder, verdict, board, processes)


def _judged(
    probe: Probe,
    recipe: Recipe,
    short: Recipe,
    folder: RunFolder,
    verdict: Verdict,
    board: Scoreboard,
    processes: int | None,
) -> Probe:
    logged, _ = read_run(folder)
    rules = board.rules
    try:
        figures = measured_figures(logged.frame, recipe, board.steps)
    except BadInput as error:
        return replace(probe, failure=str(error), bound=verdict.bound, headline=verdict.headline)
    counsel: Counsel | None = None
    unadvised = ""
    try:
        counsel = advise(
            logged.frame, short, rules.objective, rules.limits, rules.learning, board.steps, verdict, processes
        )
    except RlkitError as error:
        unadvised = str(error)
    minutes = logged_minutes(logged.frame, short)
    paid = usd_paid(read_state(folder))
    return replace(
        probe,
        figures=figures,
        steps=len(logged.frame),
        minutes=minutes or 0.0,
        usd=usd_of(recipe, minutes) if paid is None else paid,
        bound=verdict.bound,
        headline=verdict.headline,
        causes=tuple(cause.name for cause in verdict.causes),
        advice=() if counsel is None else counsel.advice,
        unadvised=unadvised,
    )
