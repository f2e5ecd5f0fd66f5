"""`rlkit advise` and `rlkit chase`: what to change after a run, and doing so until nothing pays."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlkit import terminal
from rlkit.errors import BadInput
from rlkit.run_folder import RUNS
from rlkit.run_name import RECIPE, RUN_OR_PROJECT, named, recipe_of

if TYPE_CHECKING:
    from rlkit.chase import Probe, Rules, Scoreboard
    from rlkit.chase_folder import ChaseFolder
    from rlkit.counsel import Counsel, Figures
    from rlkit.recipe import Recipe

# Advice that is printed; --json has all.
SHOWN = 6

Objective = Annotated[Literal["time", "cost"], typer.Option(help="What is to be small: minutes, or dollars.")]
Deadline = Annotated[
    float | None, typer.Option("--deadline-min", min=0.001, metavar="MIN", help="The most the whole run may take.")
]
Budget = Annotated[
    float | None, typer.Option("--budget-usd", min=0.001, metavar="USD", help="The most the whole run may cost.")
]
Learning = Annotated[
    bool,
    typer.Option("--allow-learning-changes", help="Also change what is learned: sync interval, staleness."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(advise)
    app.command()(chase)


def advise(
    subject: Annotated[str, typer.Argument(metavar="RUN", help=RUN_OR_PROJECT)],
    name: Annotated[str | None, typer.Option("--run", help="The run's name in the project, else the newest.")] = None,
    source: Annotated[str | None, typer.Option(help="A trackio server's URL or a Space, else this machine.")] = None,
    objective: Objective = "time",
    deadline: Deadline = None,
    budget: Budget = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run, when this was a short one.")] = None,
    learning: Learning = False,
    as_json: AsJson = False,
) -> None:
    """Say what to change in a run's recipe, what each change would bring, and what else it does."""
    from rlkit.advice import advise as advise_on
    from rlkit.counsel import Limits
    from rlkit.past_run import open_past_run

    meant = named(subject, name, source)
    folder = "" if meant.folder is None else str(meant.folder.path)
    run = open_past_run(folder, meant.project, meant.run, source or "")
    terminal.tell(meant.note(run.name))
    if run.recipe is None:
        raise BadInput(f"{subject}: advice needs the run's recipe, and it was logged without one")
    _needs_price(run.recipe, budget)
    with terminal.working("simulating what could be changed"):
        limits = Limits(deadline, budget)
        counsel = advise_on(run.frame, run.recipe, objective, limits, learning, steps, run.verdict)
    if as_json:
        about = {"run": run.name, "project": run.project, "verdict": run.verdict.headline}
        terminal.print_json(about | counsel.to_dict())
        return
    terminal.say(run.verdict.headline, style="bold")
    print_counsel(counsel)


def chase(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE", help=RECIPE)],
    engine: Annotated[
        Literal["sim", "local", "hf"] | None, typer.Option(help="Where it runs, else the recipe's.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change one field; repeatable.")
    ] = None,
    objective: Objective = "time",
    deadline: Deadline = None,
    budget: Budget = None,
    max_runs: Annotated[int, typer.Option(min=1, help="The most runs, the first included.")] = 6,
    steps: Annotated[int | None, typer.Option(min=10, help="Steps of each run, else 60 or the recipe's.")] = None,
    learning: Learning = False,
    name: Annotated[str | None, typer.Option(help="The chase's folder, under runs/out/.")] = None,
    approve: Annotated[
        bool,
        typer.Option("--approve", "--yes", help="Do not ask before each rented run; needs --spend-usd then."),
    ] = False,
    spend: Annotated[
        float | None,
        typer.Option("--spend-usd", min=0.001, metavar="USD", help="The most all its rented runs may cost together."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe, apply the best advice, run again, until none is worth it. The same command goes on with a chase."""
    from rlkit.chase import Rules
    from rlkit.chase_folder import ChaseFolder
    from rlkit.chase_run import PROBE_STEPS
    from rlkit.chase_run import chase as run_chase
    from rlkit.counsel import Limits
    from rlkit.progress import open_progress
    from rlkit.recipe import load_recipe

    file, _ = recipe_of(recipe_file)
    recipe = load_recipe(file, [*([f"engine={engine}"] if engine else []), *(overrides or [])])
    _needs_price(recipe, budget)
    rules = Rules(objective, Limits(deadline, budget), max_runs, learning)
    short = min(steps or PROBE_STEPS, recipe.train.steps)
    place = ChaseFolder(RUNS / name if name else _free(recipe, objective))
    board = _board(place, recipe, rules, short)

    def before(probe: Probe) -> None:
        terminal.say(f"run {probe.number}: {probe.changes or f'{recipe.name} as it is'}", terminal.err, "bold")
        if probe.predicted is not None:
            terminal.say(f"  predicted: {_in_words(probe.predicted)}", terminal.err)

    def after(probe: Probe) -> None:
        found = f"it failed: {probe.failure}" if probe.figures is None else f"measured: {_in_words(probe.figures)}"
        terminal.say(f"  {found}", terminal.err)
        if probe.headline:
            terminal.say(f"  {probe.headline}", terminal.err)

    try:
        with open_progress(terminal.err) as progress:
            asked = None if approve else terminal.agreed
            board = run_chase(board, recipe, place, progress, before, after, asked, spend_usd=spend)
    except (KeyboardInterrupt, SystemExit):
        kept = place.load()
        done = 0 if kept is None else len(kept.probes)
        terminal.say(f"{done} runs are in {place.path}; the same command goes on after them", terminal.err)
        raise
    if as_json:
        terminal.print_json(board.to_dict() | {"folder": str(place.path)})
    else:
        print_scoreboard(board, place)


def _board(place: ChaseFolder, recipe: Recipe, rules: Rules, probe_steps: int) -> Scoreboard:
    """The chase that is in the folder, or a new one. Raises BadInput for one of something else."""
    from dataclasses import replace

    from rlkit.chase import Scoreboard
    from rlkit.recipe import load_recipe, recipe_diff

    new = Scoreboard(place.path.name, recipe.name, recipe.engine, recipe.train.steps, probe_steps, rules)
    old = place.load()
    if old is None:
        return new
    if old.probes:
        others = [f"{field}: {before} -> {after}" for field, before, after in
                  recipe_diff(load_recipe(place.recipe(old.probes[0])), recipe)]  # fmt: skip
        if others or old.start != recipe.name:
            raise BadInput(
                f"{place.path} holds a chase from another recipe ({'; '.join(others) or old.start}); "
                "choose another --name"
            )
    same = replace(old.rules, max_runs=rules.max_runs) == rules and old.probe_steps == probe_steps
    if old.probes and not same:
        raise BadInput(
            f"{place.path} holds a chase with another objective, limit or number of steps; choose another --name"
        )
    return replace(new, probes=old.probes)


def _free(recipe: Recipe, objective: str) -> Path:
    """`chase-NAME`, or the first of its like whose runs' names trackio does not have from another checkout."""
    from rlkit.results import logged_names

    first = f"chase-{recipe.name}" + ("" if objective == "time" else f"-{objective}")
    taken = logged_names(recipe)
    for candidate in itertools.chain([first], (f"{first}-{count}" for count in itertools.count(2))):
        if (RUNS / candidate).exists() or f"{candidate}-1" not in taken:
            return RUNS / candidate
    raise AssertionError


def _needs_price(recipe: Recipe, budget: float | None) -> None:
    if budget is not None and recipe.hardware.usd_per_hour is None:
        raise BadInput("hardware.usd_per_hour: not set, and a budget needs it")


def print_counsel(counsel: Counsel) -> None:
    """How far the simulator is from the run, then each change with what it brings, the best first."""
    terminal.say(f"The run: {_in_words(counsel.as_it_is)}.")
    compared = [f"{name} {logged:.3g} (simulated {simulated:.3g})" for name, (simulated, logged) in
                counsel.twin.figures.items()]  # fmt: skip
    terminal.say(f"  The simulator calibrated on it: {', '.join(compared)}.")
    worth = [one for one in counsel.advice if one.gain > 0]
    for place, one in enumerate(worth[:SHOWN], 1):
        what = "cost" if counsel.objective == "cost" else "time"
        label = f"{place}. {one.gain:.0%} less {what}:"
        terminal.labelled(label, "green", f"{one.changes}" + (" (changes what is learned)" if one.learning else ""))
        terminal.say(f"   {_in_words(one.predicted)}" + (f"; against: {', '.join(one.causes)}" if one.causes else ""))
        for sentence in one.side_effects:
            terminal.say(f"   {sentence}")
    if not worth:
        terminal.say("No change of the recipe that was tried is predicted to bring anything.")
    for refused in counsel.refused:
        terminal.labelled("refused:", "red", f"{' '.join(refused.overrides)}: {refused.why}")
    for sentence in counsel.unanswered:
        terminal.labelled("no field answers", "yellow", sentence)
    for note in counsel.notes:
        terminal.labelled("note:", "yellow", note)


def print_scoreboard(board: Scoreboard, place: ChaseFolder) -> None:
    """One row a run, then the best and why the chase ended."""
    from rich.table import Table

    table = Table("run", "change", "step, s", "minutes", "predicted", "USD", "bound by", box=None)
    best = board.best
    for probe in board.probes:
        change = probe.changes or "the recipe as it is"
        if probe.parent is not None and probe.parent != probe.number - 1:
            change += f" (from run {probe.parent})"
        row = [str(probe.number), change]
        if probe.figures is None:
            row += ["", "", "", "", f"failed: {probe.failure}"]
        else:
            usd = "" if probe.figures.usd is None else f"{probe.figures.usd:.2f}"
            predicted = "" if probe.predicted is None else f"{probe.predicted.wall_clock_min:.1f}"
            minutes = f"{probe.figures.wall_clock_min:.1f}"
            row += [f"{probe.figures.step_s:.2f}", minutes, predicted, usd, probe.bound]
        table.add_row(*row, style="bold" if best is not None and probe.number == best.number else None)
    terminal.print_table(table)
    terminal.say(f"Minutes and USD are of {board.steps} steps, from {board.probe_steps} of each run.")
    spent = [probe.usd for probe in board.probes if probe.usd is not None]
    if spent and board.engine == "hf":
        terminal.say(f"The chase itself: about {sum(spent):.2f} USD.")
    terminal.say(f"Ended: {board.stopped}.")
    if best is not None:
        terminal.say(f"Best: {place.recipe(best)}")


def _in_words(figures: Figures) -> str:
    price = "" if figures.usd is None else f", {figures.usd:.2f} USD"
    return f"{figures.step_s:.2f} s a step, {figures.wall_clock_min:.1f} minutes{price}"


__all__ = ["register"]
