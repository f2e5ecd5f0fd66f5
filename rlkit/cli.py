"""The command line: reads options, calls one function, prints what it returns.

Commands import what they need when they run, so that `rlkit --help` and `rlkit check` start at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlkit import (
    advice_cli,
    calibrate_cli,
    compare_cli,
    control_cli,
    diagnosis_cli,
    jobs_cli,
    proxy_cli,
    reading_cli,
    sweep_cli,
    terminal,
)
from rlkit.cli_errors import OneLineErrors
from rlkit.errors import BadInput, RlkitError, RunFailed
from rlkit.run_folder import RUNS, RunFolder
from rlkit.run_name import RECIPE, recipe_of

if TYPE_CHECKING:
    from rlkit.engines.base import Event, OnEvent
    from rlkit.preflight import Finding
    from rlkit.recipe import Recipe

app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rlkit import __version__

        terminal.say(f"rlkit {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Why is this asynchronous GRPO run slow, and what to change."""


RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help=RECIPE)]
Engine = Annotated[Literal["local", "hf", "sim"] | None, typer.Option(help="Where the jobs run, else the recipe's.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change one field; repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    recipe_file: RecipeFile,
    engine: Engine = None,
    overrides: Set = None,
    name: Annotated[str | None, typer.Option(help="The run's folder, under runs/out/.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The run's folder, anywhere.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue this recipe's newest run, or the named.")] = False,
    report: Annotated[bool, typer.Option(help="Write the HTML report.")] = True,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before rented hardware is started.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe, then say what bounded it. The same folder again continues its run."""
    from rlkit.engines import launch
    from rlkit.engines.state import has_finished
    from rlkit.progress import open_progress
    from rlkit.results import keep_metrics, write_results

    recipe, earlier = _load(recipe_file, engine, overrides)
    if earlier is not None:
        if name or folder:
            raise BadInput(f"{recipe_file}: is a run already, leave --name and --folder out")
        folder, resume = earlier.path, True
    target = _choose_folder(recipe, name, folder, resume)
    findings = _findings(recipe, target.path)
    terminal.print_findings(findings, terminal.err)
    _stop_at_errors(findings)
    about = f"{recipe.name} in {target.path}: {recipe.train.steps} steps, engine {recipe.engine}"
    place = shlex.quote(str(target.path))
    try:
        with open_progress(terminal.err) as progress:
            outcome = launch(
                recipe, target, _announcing(about, progress), findings, lambda price: yes or terminal.agreed(price)
            )
    except (RunFailed, OSError, KeyboardInterrupt, SystemExit):  # OSError: a full disk; SystemExit: kill <pid>
        kept = f"metrics so far: {target.metrics}; " if keep_metrics(recipe, target) else ""
        if has_finished(target):  # interrupted while its jobs were being stopped
            terminal.say(f"the run itself is complete; read it with: rlkit report {place}", terminal.err)
        elif target.recipe.exists():
            terminal.say(f"{kept}continue with: rlkit run {place}", terminal.err)
        raise
    terminal.say("reading the run back" + (" and writing its report" if report else ""), terminal.err)
    try:
        verdict = write_results(recipe, target, report)
    except (RlkitError, OSError, KeyboardInterrupt, SystemExit):
        again = f"rlkit {'report' if report else 'diagnose'} {place}"
        terminal.say(f"the run itself is complete; read it with: {again}", terminal.err)
        raise
    if as_json:
        ended = {"folder": str(target.path), "steps": outcome.steps, "seconds": outcome.seconds}
        ended["peak_memory_gib"] = outcome.peak_memory_gib
        page = str(target.report) if report else None
        terminal.print_json(ended | {"report": page, "verdict": verdict.model_dump(mode="json")})
        return
    memory = "" if outcome.peak_memory_gib is None else f", at most {outcome.peak_memory_gib:.1f} GiB of memory"
    terminal.say(f"{outcome.steps} steps in {outcome.seconds:.0f} s{memory}", terminal.err)
    terminal.print_verdict(verdict, evidence=False)
    if report:
        terminal.say(f"Report: {target.report}")


@app.command()
def check(
    recipe_file: RecipeFile,
    engine: Engine = None,
    overrides: Set = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="With engine hf: try the bucket's mount and the Jobs proxy, for cents.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what would go wrong with a recipe on this machine; start nothing, or with --measure two cheap Jobs."""
    from dataclasses import asdict

    recipe, earlier = _load(recipe_file, engine, overrides)
    findings = _findings(recipe, _free_folder(recipe) if earlier is None else earlier.path)
    figures: dict[str, Any] = {}
    if measure:
        from rlkit.jobs_cli import measure_transport

        figures, more = measure_transport(recipe)
        findings += more
    if as_json:
        shown: dict[str, Any] = {"recipe": recipe.name, "findings": [asdict(finding) for finding in findings]}
        terminal.print_json(shown | ({"figures": figures} if measure else {}))
    elif findings:
        terminal.print_findings(findings)
    else:
        changes = ", ".join(_changes(engine, overrides))
        terminal.say(f"{recipe_file}{changes and f' with {changes}'}: nothing to change")
    _stop_at_errors(findings)


# Help lists the commands in this order: a run, what it tells, what to change, several runs, then what is simulated.
reading_cli.register(app)
app.command("watch")(diagnosis_cli.watch)
control_cli.register(app)
advice_cli.register(app)
app.command()(compare_cli.compare)
app.command()(sweep_cli.sweep)


@app.command()
def predict(
    recipe_file: RecipeFile,
    overrides: Set = None,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations, each with a seed of its own.")] = 3,
    constants: Annotated[Path | None, typer.Option(help="What rlkit calibrate wrote, else the built-in ones.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how long a recipe would take, what it would cost and what would bound it; start nothing."""
    from rlkit.simulation.calibration import load_constants
    from rlkit.simulation.prediction import predict as predict_recipe

    recipe, _ = _load(recipe_file, "sim", overrides)
    _stop_at_errors_of(recipe)
    physics, workload = load_constants(constants, recipe.model.name) if constants else (None, None)
    with terminal.working(f"simulating {recipe.name}"):
        prediction = predict_recipe(recipe, seeds, physics, workload)
    if as_json:
        terminal.print_json(prediction.to_dict())
    else:
        terminal.print_prediction(prediction)


@app.command()
def plan(
    recipe_file: RecipeFile,
    overrides: Set = None,
    budget: Annotated[
        float | None, typer.Option("--budget-usd", min=0.001, metavar="USD", help="The most it may cost.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline-min", min=0.001, metavar="MIN", help="The most it may take.")
    ] = None,
    sync_steps: Annotated[
        list[int] | None, typer.Option(min=1, help="Also try this rollout.weight_sync_steps; it changes learning.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest and cheapest ways to run a recipe, what it learns left alone; start nothing."""
    from rlkit.simulation.planning import plan as plan_recipe

    recipe, _ = _load(recipe_file, "sim", overrides)
    _stop_at_errors_of(recipe)
    with terminal.working(f"simulating ways to run {recipe.name}") as told:
        found = plan_recipe(recipe, budget, deadline, sync_steps or (), on_done=told)
    if as_json:
        terminal.print_json(found.to_dict())
    else:
        terminal.print_plan(found)


@app.command()
def simulate(
    published: Annotated[
        bool, typer.Option("--published", help="The nine published runs beside their figures.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each run.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare the simulator with what was published, cell by cell."""
    from rlkit.simulation.published import compare

    if not published:
        raise BadInput("rlkit simulate: give --published; a recipe is simulated by: rlkit run RECIPE --engine sim")
    with terminal.working("simulating the published runs") as told:
        comparison = compare(seeds, on_done=told)
    if as_json:
        terminal.print_json(comparison.to_dict())
    else:
        terminal.print_comparison(comparison)
    if comparison.misses:
        raise typer.Exit(1)


calibrate_cli.register(app)
app.command("evaluate-diagnosis")(diagnosis_cli.evaluate_diagnosis)
app.command()(proxy_cli.proxy)
app.add_typer(jobs_cli.app, name="jobs")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, and what would not work here and why."""
    from rlkit.doctor import examine

    lines = examine()
    if as_json:
        terminal.print_json([line.to_dict() for line in lines])
    else:
        terminal.print_lines(lines)
    if any(line.state == "fail" for line in lines):
        raise typer.Exit(1)


def _announcing(about: str, on_event: OnEvent) -> OnEvent:
    """`on_event`, after a line about the run at the first event: until then the engine may still refuse it."""
    untold = iter([about])

    def tell(event: Event) -> None:
        for line in untold:
            terminal.say(line, terminal.err)
        on_event(event)

    return tell


def _load(path: Path, engine: str | None, overrides: list[str] | None) -> tuple[Recipe, RunFolder | None]:
    """The recipe of a file or of a run, and the folder of that run."""
    from rlkit.recipe import load_recipe

    file, earlier = recipe_of(path)
    return load_recipe(file, _changes(engine, overrides)), earlier


def _changes(engine: str | None, overrides: list[str] | None) -> list[str]:
    return [*([f"engine={engine}"] if engine else []), *(overrides or [])]


def _choose_folder(recipe: Recipe, name: str | None, folder: Path | None, resume: bool) -> RunFolder:
    """The folder that was named, else a new one (`<recipe>`, `<recipe>-2`, ...); with `resume` the newest of those."""
    if name and folder:
        raise BadInput("--name and --folder: give one of them")
    if name is not None and (Path(name).name != name or name == ".."):
        raise BadInput(f"--name {name!r}: give a name of a folder under {RUNS}, use --folder for another place")
    chosen = folder or (RUNS / name if name else None)
    if chosen is None and resume:
        named_so = re.compile(rf"{re.escape(recipe.name)}(-\d+)?")
        earlier = [file for file in RUNS.glob("*/recipe.yaml") if named_so.fullmatch(file.parent.name)]
        if not earlier:
            raise BadInput(f"--resume: there is no run of {recipe.name} under {RUNS}")
        chosen = max(earlier, key=lambda file: file.stat().st_mtime).parent
    if chosen is None:
        from rlkit.results import logged_names

        # Another checkout may have logged runs to the same trackio project.
        chosen = _free_folder(recipe, logged_names(recipe))
    elif resume and not (chosen / "recipe.yaml").exists():
        raise BadInput(f"--resume: {chosen} holds no run")
    return RunFolder(chosen)


def _free_folder(recipe: Recipe, taken: Collection[str] = ()) -> Path:
    """The first folder under runs/out/ for a new run that is not there, and whose name is not taken."""
    from rlkit.run_folder import free_folder

    return free_folder(RUNS, recipe.name, taken)


def _findings(recipe: Recipe, folder: Path) -> list[Finding]:
    from rlkit import preflight

    return preflight.check(recipe, preflight.gather_facts(recipe, folder))


def _stop_at_errors_of(recipe: Recipe) -> None:
    """Print the errors that preflight finds, and end there if there are any; warnings are not what was asked for."""
    errors = [finding for finding in _findings(recipe, _free_folder(recipe)) if finding.severity == "error"]
    terminal.print_findings(errors, terminal.err)
    _stop_at_errors(errors)


def _stop_at_errors(findings: list[Finding]) -> None:
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(BadInput.exit_code)
