"""`rlkit calibrate`: the simulator's constants, from a user's own runs or from the published figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit import terminal
from rlkit.errors import BadInput
from rlkit.run_name import folder_of

if TYPE_CHECKING:
    from rlkit.simulation.published_fit import PublishedFit


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(calibrate)


def calibrate(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN...]", help="Real runs on this machine: their folders or names under runs/out."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file of constants.")] = Path("constants.json"),
    published: Annotated[
        bool, typer.Option("--published", help="Fit to the published figures instead: minutes of CPU.")
    ] = False,
    hold_out: Annotated[
        list[str] | None,
        typer.Option("--hold-out", metavar="CELL", help="Do not look at RUN:FIGURE, or at a whole RUN; repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CONSTANT", help="Fit just this constant; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit the simulator's constants to real runs, for rlkit predict --constants, or to what was published."""
    if published == bool(subjects):
        raise BadInput("calibrate: name real runs, or give --published")
    if not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: there is no folder {out.absolute().parent}")
    if published:
        from rlkit.simulation.published_fit import fit_published

        with terminal.working("simulating the published runs") as told:
            fitted = fit_published(hold_out or (), only or (), on_simulated=told)
        fitted.save(out)
        if as_json:
            terminal.print_json(fitted.to_dict())
        else:
            _print_fit(fitted)
            terminal.say(f"Constants: {out}")
        return
    if hold_out or only:
        raise BadInput("--hold-out and --only: belong to --published; runs that are not named are held out")
    from rlkit.results import read_run
    from rlkit.simulation.calibration import LoggedRun
    from rlkit.simulation.calibration import calibrate as calibrate_runs

    runs = []
    for folder in [folder_of(subject) for subject in subjects or []]:
        logged, recipe = read_run(folder)
        if recipe is not None and recipe.engine == "sim":
            raise BadInput(f"{folder.path}: a simulated run; constants are fitted to real ones")
        runs.append(LoggedRun(str(folder.path), logged.frame, recipe))
    with terminal.working("fitting the simulator's constants"):
        calibration = calibrate_runs(runs)
    calibration.save(out)
    if as_json:
        terminal.print_json(calibration.to_dict())
    else:
        terminal.print_calibration(calibration)
        terminal.say(f"Constants: {out}")


def _print_fit(fitted: PublishedFit) -> None:
    from rich.table import Table

    constants = Table("constant", "before", "after", "change", box=None)
    for name, (before, after) in fitted.values.items():
        constants.add_row(name, f"{before:.4g}", f"{after:.4g}", f"{after / before - 1:+.1%}")
    terminal.print_table(constants)
    cells = Table("cell", "published", "before", "after", "error", "", box=None)
    for cell in fitted.cells:
        figures = (f"{cell.published:.4g}", f"{cell.before:.4g}", f"{cell.after:.4g}", f"{cell.error:+.1%}")
        cells.add_row(cell.cell, *figures, "" if cell.fitted else "held out")
    terminal.print_table(cells)
