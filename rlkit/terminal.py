"""What the command line prints: results on stdout, everything about them on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from rlkit.errors import BadInput
from rlkit.wording import number

if TYPE_CHECKING:
    from rich.table import Table

    from rlkit.diagnosis import Verdict
    from rlkit.doctor import Line
    from rlkit.evaluation.evaluate import Score
    from rlkit.ledger import Entry
    from rlkit.preflight import Finding
    from rlkit.simulation.calibration import Calibration
    from rlkit.simulation.planning import Plan
    from rlkit.simulation.prediction import Prediction, Spread
    from rlkit.simulation.published import Comparison

# Long lines stay whole: they may be read by a program, and a terminal wraps them itself.
out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

# Of a table that no terminal shows: the widest one here, of published figures, has 150 columns. rich takes 80 then.
PIPED_WIDTH = 160

# Where no terminal shows a spinner: work that is over sooner needs no word.
QUIET_S = 2.0
# And a count that is read in a log needs few lines.
COUNT_EVERY_S = 30.0


def say(text: str, console: Console = out, style: str | None = None) -> None:
    """One line, as it is: brackets in it are no markup."""
    console.print(text, style=style, markup=False)


def tell(note: str | None) -> None:
    """A line on stderr beside the answer, where there is one to say."""
    if note is not None:
        say(note, err)


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[int, int], None]]:
    """Say on stderr what is being done while it lasts; called with n and m, also how much of it.

    A spinner on a terminal; elsewhere a line once it takes seconds, and one now and then with the count.
    """
    if err.is_terminal:
        from rich.markup import escape
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.fields[count]}"))
        with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as progress:
            task = progress.add_task(escape(what), total=None, count="")
            yield lambda done, whole: progress.update(task, count=f"{done} of {whole}")
        return
    last = time.monotonic()

    def tell_count(done: int, whole: int) -> None:
        nonlocal last
        if time.monotonic() - last >= COUNT_EVERY_S:
            last = time.monotonic()
            say(f"{what}: {done} of {whole}", err)

    first = threading.Timer(QUIET_S, say, (f"{what} ...", err))
    first.daemon = True
    first.start()
    try:
        yield tell_count
    finally:
        first.cancel()
        first.join()


def print_table(table: Table) -> None:
    """A table on stdout, as wide as the terminal, and wide enough for all of it where there is none."""
    console = out if out.is_terminal else Console(width=max(out.width, PIPED_WIDTH), highlight=False)
    console.print(table)


def labelled(label: str, colour: str, text: str, console: Console = out) -> None:
    """One line that begins with a coloured label."""
    console.print(label, style=colour, markup=False, end=" ")
    say(text, console)


def print_json(data: object) -> None:
    """Indented JSON on stdout."""
    print(json.dumps(data, indent=2))


def print_error(message: str) -> None:
    """`error: ` and the message on stderr; the log lines that may follow its first line stay uncoloured."""
    first, *rest = message.splitlines() or [""]
    say(f"error: {first}", err, "red")
    for line in rest:
        say(line, err)


def agreed(price: object) -> bool:
    """Ask on the terminal whether to spend this. Raises BadInput when nobody is there to be asked."""
    if not sys.stdin.isatty():
        raise BadInput(f"--yes: this costs {price}; give --yes to start it without being asked")
    return typer.confirm(f"This costs {price}. Start it?", err=True)


def print_findings(findings: Iterable[Finding], console: Console = out) -> None:
    """One line a finding."""
    for finding in findings:
        colour = "red" if finding.severity == "error" else "yellow"
        labelled(f"{finding.severity}:", colour, str(finding), console)


def print_verdict(verdict: Verdict, evidence: bool) -> None:
    """The headline, with `evidence` what it rests on, and the next action."""
    say(verdict.headline, style="bold")
    if evidence:
        for item in verdict.evidence:
            say(f"  {item.sentence}")
        shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in verdict.shares.items())
        if shares:
            say(f"  Of a step: {shares}.")
        if verdict.cause is not None:
            cost = "" if verdict.causes[0].seconds is None else f", {number(verdict.causes[0].seconds)} s a step"
            say(f"  Because of {verdict.cause}{cost}.")
        for cause in verdict.causes[1:]:
            cost = "" if cause.seconds is None else f", {number(cause.seconds)} s a step"
            say(f"  Also: {cause.text}{cost}.")
        for sentence in verdict.contradictions:
            say(f"  Contradiction: {sentence}")
        if len(verdict.timeline) > 1:
            parts = [f"{part.bound} from step {part.first_step:.0f}" for part in verdict.timeline]
            say(f"  Over the run: {', '.join(parts)}.")
        say(f"  {verdict.would_change}")
        say(f"  Confidence: {verdict.confidence} ({verdict.reason}).")
    say(f"Next: {verdict.next_action}")


def print_lines(lines: list[Line]) -> None:
    """The doctor's lines, their names in a column."""
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    width = max(len(line.name) for line in lines)
    for line in lines:
        labelled(f"{line.state:<4}", colours[line.state], f"{line.name:<{width}}  {line.text}")


def print_prediction(prediction: Prediction) -> None:
    """The verdict, then each figure with its range over the seeds, then what is extrapolated."""
    print_verdict(prediction.verdict, evidence=False)

    def line(name: str, unit: str, spread: Spread, digits: int) -> None:
        low, high = f"{spread.low:,.{digits}f}", f"{spread.high:,.{digits}f}"
        say(f"  {name:<24} {spread.mean:,.{digits}f} {unit}".rstrip() + f"  ({low} to {high})")

    steps = "1 step" if prediction.steps == 1 else f"{prediction.steps} steps"
    say(f"{steps}, mean and range of {prediction.seeds} simulations:")
    line("step", "s", prediction.step_s, 2)
    line("wall-clock", "min", prediction.wall_clock_min, 1)
    if prediction.usd is not None:
        line("cost", "USD", prediction.usd, 2)
    line("staleness", "versions", prediction.staleness, 2)
    line("dropped / trained", "", prediction.dropped_over_trained, 3)
    line("preemptions / request", "", prediction.preemptions_per_request, 3)
    line("useful tokens", "tok/s", prediction.useful_tok_s, 0)
    if len(set(prediction.bounds)) > 1:
        say(f"  The seeds disagree on what bounds it: {', '.join(prediction.bounds)}.")
    for note in prediction.extrapolated:
        labelled("extrapolated:", "yellow", note)


def print_ledger(entries: list[Entry]) -> None:
    """One row a use of time, device seconds, its part of the side's time, dollars where a price is known."""
    from rich.table import Table

    table = Table("side", "use", "seconds", "share", "USD", box=None)
    for entry in entries:
        usd = "" if entry.usd is None else f"{entry.usd:,.2f}"
        table.add_row(entry.side, entry.use, f"{entry.seconds:,.1f}", f"{entry.share:.1%}", usd)
    print_table(table)


def print_score(name: str, score: Score) -> None:
    """How often the verdicts of a half, or of all, are right, and their probabilities; what is taken for what."""

    def part(fraction: float | None) -> str:
        return "none to count" if fraction is None else f"{fraction:.1%}"

    say(f"{name}: {score.runs} runs", style="bold")
    say(f"  side right   {part(score.side_right)} of the {score.bound_runs} with a gain of over 2 %")
    say(f"               {part(score.side_as_good)} with sides that are as good: within half a percent of the best")
    say(f"               {part(score.shown_again)} is how often experiments on one run agree with those on its others")
    say(f"  cause right  {part(score.cause_right)} of them, {part(score.cause_as_good)} with causes as good")
    say(f"  none named   {part(score.free_right)} of the {score.free_runs} without")
    say("  claimed, runs, right")
    for claimed, (runs, right) in score.calibration.items():
        say(f"    {claimed}  {runs:5}  {right:.1%}")
    for title, table in (("side", score.confusion), ("cause, where the side is right", score.causes)):
        say(f"  {title}: what interventions show, then what was said")
        for true, said in table.items():
            say(f"    {true:<15} " + ", ".join(f"{name or 'none'} {count}" for name, count in said.items()))


def print_comparison(comparison: Comparison) -> None:
    """One row a published figure, the misses in red, and a last line that counts them."""
    from rich.table import Table

    def value(number: float | None) -> str:
        return "" if number is None else f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.0f}"

    table = Table("run", "figure", "statistic", "published", "simulated", "error", "seed sd", "within", box=None)
    for cell in comparison.cells:
        ends = [value(cell.published_low)] + [value(cell.published_high)] * (cell.published_low != cell.published_high)
        error = "" if cell.error is None else f"{cell.error:+.1%}"
        within = "" if cell.tolerance is None else f"{'yes' if cell.within else 'NO'}: {cell.tolerance}"
        row = [cell.run, cell.figure, cell.statistic, " to ".join(ends), value(cell.simulated), error]
        table.add_row(*row, value(cell.deviation), within, style="red" if cell.within is False else None)
    for verdict in comparison.verdicts:
        simulated = ", ".join(dict.fromkeys(f"{bound}-bound" for bound in verdict.simulated))
        within = "yes" if verdict.within else "NO"
        table.add_row(verdict.run, "verdict", "diagnosis", verdict.published, simulated, "", "", within)
    print_table(table)
    judged = [cell for cell in comparison.cells if cell.within is not None]
    say(f"{len(comparison.misses)} of {len(judged) + len(comparison.verdicts)} judged figures are out of tolerance.")
    chase, longest = comparison.chase_cpu_s, comparison.longest_run_cpu_s
    say(f"CPU of one seed: the chase {chase:.1f} s, the longest run {longest:.1f} s.")


def print_plan(plan: Plan) -> None:
    """The recipe as it is, then the front, fastest first."""
    from rich.table import Table

    table = Table("minutes", "USD", "step, s", "staleness", "bound by", "changes", box=None)
    for point in (plan.as_it_is, *plan.front):
        changes = " ".join(point.changes) or "none: the recipe as it is"
        usd = "" if point.usd is None else f"{point.usd:.2f}"
        table.add_row(
            f"{point.wall_clock_min:.1f}", usd, f"{point.step_s:.2f}", f"{point.staleness:.2f}", point.bound, changes
        )
    print_table(table)
    if not plan.front:
        say("Nothing that was tried keeps to what was asked.")
        if plan.nearest is not None:
            changes = " ".join(plan.nearest.changes) or "the recipe as it is"
            cost = "" if plan.nearest.usd is None else f"{plan.nearest.usd:.2f} USD, "
            say(f"Nearest: {cost}{plan.nearest.wall_clock_min:.1f} min with {changes}.")
    say(f"{plan.simulated} candidates simulated, {plan.pruned} more could not have been faster.", err)
    for note in plan.extrapolated:
        labelled("extrapolated:", "yellow", note)


def print_calibration(calibration: Calibration) -> None:
    """What the calibrated simulator gives for the runs it was calibrated on, beside what they logged."""
    from rich.table import Table

    table = Table("run", "figure", "logged", "simulated", "error", box=None)
    for run, figures in calibration.residuals.items():
        for figure, (simulated, logged) in figures.items():
            error = f"{simulated / logged - 1:+.1%}" if logged else ""
            table.add_row(run, figure, f"{logged:.4g}", f"{simulated:.4g}", error)
    print_table(table)
