"""How several runs are drawn in one figure: a colour and a dash each, which they keep in every figure of a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlkit.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION


@dataclass(frozen=True)
class Look:
    """A run's line: colour, and a dash and a marker that tell it apart where colours are not seen."""

    colour: str
    dash: str
    symbol: str


# Orange and sky come last: in greyscale they are near vermillion and blue, so their dashes are far from those'.
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "2px,6px")
_SYMBOLS = ("circle", "diamond", "square", "cross", "x", "triangle-up", "star")


def looks(runs: Iterable[str]) -> dict[str, Look]:
    """A look for every run by its place, the same for the same runs; from the eighth on colours meet other dashes."""
    found = {}
    for place, run in enumerate(runs):
        colour, shift = place % len(_COLOURS), place // len(_COLOURS)
        shape = (colour + 2 * shift) % len(_DASHES)
        found[run] = Look(_COLOURS[colour], _DASHES[shape], _SYMBOLS[shape])
    return found
