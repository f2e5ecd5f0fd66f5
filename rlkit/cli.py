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

from rlkit import advice_cli, calibrate_cli, compare_cli, control_cli, diagnosis_cli, jobs_cli, sweep_cli, terminal
from rlkit.cli_errors import OneLineErrors
from rlkit.errors import BadInput, RlkitError, RunFailed

if TYPE_CHECKING:
    from rlkit.engines.base import Event, OnEvent
    from rlkit.preflight import Finding
    from rlkit.recipe import Recipe
    from rlkit.run_folder import RunFolder

RUNS = Path("runs/out")


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


app.add_typer(jobs_cli.app, name="jobs")
app.command()(sweep_cli.sweep)
app.command()(compare_cli.compare)
app.command("watch")(diagnosis_cli.watch)
app.command("evaluate-diagnosis")(diagnosis_cli.evaluate_diagnosis)
calibrate_cli.register(app)
control_cli.register(app)
advice_cli.register(app)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML), or the folder of a run.")]
Engine = Annotated[Literal["local", "hf", "sim"] | None, typer.Option(help="Where the jobs run, else the recipe's.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change one field; repeatable.")]
Source = Annotated[str | None, typer.Option(help="A trackio server's URL or a Space, else this machine.")]
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
    from rlkit.engines.state import read_state
    from rlkit.progress import open_progress
    from rlkit.results import keep_metrics, write_results

    if recipe_file.is_dir():
        if name or folder:
            raise BadInput(f"{recipe_file}: is a run's folder already, leave --name and --folder out")
        recipe_file, folder, resume = recipe_file / "recipe.yaml", recipe_file, True
    recipe = _load(recipe_file, engine, overrides)
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
        if read_state(target).get("status") == "finished":  # interrupted while its jobs were being stopped
            terminal.say(f"the run itself is complete; read it with: rlkit report {place}", terminal.err)
        elif target.recipe.exists():
            terminal.say(f"{kept}continue with: rlkit run {place}", terminal.err)
        raise
    terminal.say("reading the run back" + (" and writing its report" if report else ""), terminal.err)
    try:
        verdict = write_results(recipe, target, report)
    except (RlkitError, OSError, KeyboardInterrupt):
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

    is_run = recipe_file.is_dir()
    recipe = _load(recipe_file / "recipe.yaml" if is_run else recipe_file, engine, overrides)
    findings = _findings(recipe, recipe_file if is_run else _free_folder(recipe))
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
        terminal.say(f"{recipe_file}: nothing to change")
    _stop_at_errors(findings)


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

    recipe = _load(recipe_file / "recipe.yaml" if recipe_file.is_dir() else recipe_file, "sim", overrides)
    _stop_at_errors_of(recipe)
    physics, workload = load_constants(constants, recipe.model.name) if constants else (None, None)
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
        float | None, typer.Option("--budget-usd", min=0, metavar="USD", help="The most it may cost.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline-min", min=0, metavar="MIN", help="The most it may take.")
    ] = None,
    sync_steps: Annotated[
        list[int] | None, typer.Option(min=1, help="Also try this rollout.weight_sync_steps; it changes learning.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest and cheapest ways to run a recipe, what it learns left alone; start nothing."""
    from rlkit.simulation.planning import plan as plan_recipe

    recipe = _load(recipe_file / "recipe.yaml" if recipe_file.is_dir() else recipe_file, "sim", overrides)
    _stop_at_errors_of(recipe)
    found = plan_recipe(recipe, budget, deadline, sync_steps or ())
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
    comparison = compare(seeds)
    if as_json:
        terminal.print_json(comparison.to_dict())
    else:
        terminal.print_comparison(comparison)
    if comparison.misses:
        raise typer.Exit(1)


@app.command()
def diagnose(
    project: Annotated[str, typer.Argument(help="A trackio project, PROJECT/RUN, or the folder of a run.")],
    name: Annotated[str | None, typer.Option("--run", help="The run's name, else the newest.")] = None,
    source: Source = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Also where every second of it went.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what bounded a run, and why."""
    from dataclasses import asdict

    from rlkit.diagnosis import diagnose as diagnose_frame
    from rlkit.ledger import waste_ledger
    from rlkit.past_run import named
    from rlkit.results import read_run
    from rlkit.run_folder import RunFolder
    from rlkit.tracking import load_run

    recipe: Recipe | None
    folder, known_project, run_name = named(project)
    if folder:
        if name or source:
            raise BadInput(f"{project}: is a run's folder, leave --run and --source out")
        logged, recipe = read_run(RunFolder(Path(folder)))
        verdict = diagnose_frame(logged.frame, recipe)
    else:
        logged = load_run(known_project, name or run_name or None, source=source)
        recipe = logged.recipe
        verdict = diagnose_frame(logged.frame, recipe)
    if ledger and recipe is None:
        raise BadInput(f"{project}: --ledger needs the run's recipe, and it was logged without one")
    entries = waste_ledger(logged.frame, recipe) if ledger and recipe is not None else []
    if as_json:
        about: dict[str, Any] = {"project": logged.project, "run": logged.name}
        about |= {"ledger": [asdict(entry) for entry in entries]} if ledger else {}
        terminal.print_json(about | {"verdict": verdict.model_dump(mode="json")})
    else:
        terminal.print_verdict(verdict, evidence=True)
        if ledger:
            terminal.print_ledger(entries)


@app.command()
def report(
    subject: Annotated[str, typer.Argument(metavar="NOTEBOOK|RUN", help="A notebook, a run's folder, or its name.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file.")] = None,
    parameters: Annotated[
        list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="A notebook's parameter; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what a run's report says as JSON.")] = False,
) -> None:
    """Render a notebook, or a run's report, as one HTML file that opens offline; a run's has a JSON file beside it."""
    from rlkit.report import render_notebook, report_run, twin
    from rlkit.run_folder import RunFolder

    if subject.endswith(".ipynb"):
        if as_json:
            raise BadInput("--json: only a run's report is printed as JSON, give its folder")
        notebook = Path(subject)
        values = dict(_parameter(text) for text in parameters or [])
        written = render_notebook(notebook, values, out or RUNS / f"{notebook.stem}.html")
    elif parameters:
        raise BadInput(f"-p {parameters[0]}: only a notebook takes parameters, {subject!r} is not one (*.ipynb)")
    else:
        folder = next((path for path in (Path(subject), RUNS / subject) if path.is_dir()), None)
        if folder is None:
            raise BadInput(f"{subject}: neither a notebook (*.ipynb), nor a run's folder, nor a run under {RUNS}")
        written = report_run(RunFolder(folder), out)
        if as_json:
            print(twin(written).read_text(encoding="utf-8"), end="")
            return
    terminal.say(str(written))


@app.command()
def runs(
    project: Annotated[str, typer.Argument(help="A trackio project.")], source: Source = None, as_json: AsJson = False
) -> None:
    """List the runs of a trackio project, oldest first."""
    import pandas as pd
    from rich.table import Table

    from rlkit.tracking import list_runs

    frame = list_runs(project, source)
    if as_json:
        print(frame.to_json(orient="records", date_format="iso", indent=2))
        return
    table = Table("run", "steps", "started (UTC)", "last update (UTC)", box=None)
    for row in frame.to_dict("records"):
        moments = [row[column] for column in ("created", "last_update")]
        times = ["unknown" if pd.isna(moment) else f"{moment:%Y-%m-%d %H:%M}" for moment in moments]
        table.add_row(str(row["name"]), str(row["steps"]), *times)
    terminal.print_table(table)


@app.command()
def proxy(
    replicas: Annotated[list[str], typer.Option("--replica", metavar="URL", help="A vLLM server; repeatable.")],
    recipe_file: Annotated[
        Path | None, typer.Option("--recipe", help="Takes routing, transport and max_loras from it.")
    ] = None,
    overrides: Set = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    token_env: Annotated[str | None, typer.Option(help="The variable with the token the replicas want.")] = None,
    incoming_token_env: Annotated[
        str | None, typer.Option(help="The one with the token to ask clients for; needed beyond this machine.")
    ] = None,
    adapter_root: Annotated[
        Path | None, typer.Option(help="Load adapters from inside it only; needed beyond this machine.")
    ] = None,
    receivers: Annotated[
        list[str] | None,
        typer.Option("--receiver", metavar="URL", help="Takes pushed adapters beside a replica, in their order."),
    ] = None,
    receiver_token_env: Annotated[
        str | None, typer.Option(help="The variable with the token the receivers want.")
    ] = None,
    stats_file: Annotated[Path | None, typer.Option(help="Where to write the counters as JSON.")] = None,
) -> None:
    """Serve several vLLM servers as one, with every adapter on each, until stopped.

    Completions go to the server that has the prompt in its cache; pause and resume reach all servers. Counters: GET
    /proxy/stats (JSON) and /metrics (its own and every replica's).

    Example: rlkit proxy --replica http://a:8000 --replica http://b:8000 --port 8080
    """
    from rlkit.recipe import TransportSection
    from rlkit.serving.proxy import log_to_stderr, run
    from rlkit.serving.proxy_config import parse_proxy_config

    settings: dict[str, Any] = {"replicas": replicas, "host": host, "port": port, "exit_with_parent": False}
    settings |= {"token_env": token_env, "incoming_token_env": incoming_token_env, "adapter_root": adapter_root}
    settings |= {"receivers": receivers or [], "receiver_token_env": receiver_token_env, "stats_file": stats_file}
    if stats_file is not None and not stats_file.absolute().parent.is_dir():
        raise BadInput(f"--stats-file {stats_file}: there is no folder {stats_file.absolute().parent}")
    if recipe_file is not None:
        recipe = _load(recipe_file, None, overrides)
        settings |= {"routing": recipe.routing, "transport": recipe.transport, "max_loras": recipe.serve.max_loras}
    elif overrides:
        raise BadInput(f"--set {overrides[0]}: changes a recipe, give one with --recipe")
    elif receivers:
        settings["transport"] = TransportSection(kind="push")
    config = parse_proxy_config(settings, "proxy")
    log_to_stderr()
    run(config)


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


def _load(path: Path, engine: str | None, overrides: list[str] | None) -> Recipe:
    from rlkit.recipe import load_recipe

    chosen = [f"engine={engine}"] if engine else []
    return load_recipe(path, [*chosen, *(overrides or [])])


def _choose_folder(recipe: Recipe, name: str | None, folder: Path | None, resume: bool) -> RunFolder:
    """The folder that was named, else a new one (`<recipe>`, `<recipe>-2`, ...); with `resume` the newest of those."""
    from rlkit.run_folder import RunFolder

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


def _parameter(text: str) -> tuple[str, Any]:
    from rlkit.recipe_layers import parse_yaml

    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise BadInput(f"-p {text}: expected name=value")
    try:
        return name, parse_yaml(value) if value else ""
    except BadInput:
        raise BadInput(f"-p {text}: {value!r} is not a YAML value") from None
