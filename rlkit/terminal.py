"""What the command line prints: results on stdout, everything about them on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from rlkit.errors import BadInput

if TYPE_CHECKING:
    from rlkit.diagnosis import Verdict
    from rlkit.doctor import Line
    from rlkit.preflight import Finding

# Long lines stay whole: they may be read by a program, and a terminal wraps them itself.
out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


def say(text: str, console: Console = out, style: str | None = None) -> None:
    """One line, as it is: brackets in it are no markup."""
    console.print(text, style=style, markup=False)


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
        say(f"  Confidence: {verdict.confidence} ({verdict.reason}).")
    say(f"Next: {verdict.next_action}")


def print_lines(lines: list[Line]) -> None:
    """The doctor's lines, their names in a column."""
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    width = max(len(line.name) for line in lines)
    for line in lines:
        labelled(f"{line.state:<4}", colours[line.state], f"{line.name:<{width}}  {line.text}")
