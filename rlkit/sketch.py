"""A plotly figure of lines as a small static SVG: what a view that is drawn anew every second shows.

The figure stays the one source of what is drawn (`rlkit.figures`); here is only ink. A sketch needs no script, weighs a
few kilobytes, takes the colours of the page it is in, and says the figure's finding to those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from rlkit.chart import BLUE

Numbers = npt.NDArray[np.float64]

WIDTH, HEIGHT = 480, 190  # of the view box; it scales with the page
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 26
_TICKS = (6, 4)  # about as many as can be read along x and y
# More points than pixels are not seen; the highest and the lowest of each pixel's are.
MOST_POINTS = 2 * WIDTH
_DASHES = {"dash": "7 5", "dot": "2 4"}

# One style for all sketches of a page: JupyterLab says its theme on the body, other pages follow the system's.
_DARK = "--rlkit-ink: #e6edf3; --rlkit-soft: #9aa4af; --rlkit-rule: #3a424c; --rlkit-blue: #4ba3e3"
STYLE = f"""<style>
.rlkit-live {{ --rlkit-ink: #1f2328; --rlkit-soft: #59636e; --rlkit-rule: #d9dee4; --rlkit-blue: {BLUE};
  color: var(--rlkit-ink); }}
@media screen and (prefers-color-scheme: dark) {{ body:not([data-jp-theme-light]) .rlkit-live {{ {_DARK} }} }}
body[data-jp-theme-light="false"] .rlkit-live {{ {_DARK} }}
.rlkit-sketch {{ margin: 0; }}
.rlkit-sketch h3 {{ font-size: 14px; font-weight: 600; margin: 4px 0 2px; color: var(--rlkit-ink); }}
.rlkit-sketch svg {{ display: block; width: 100%; height: auto; }}
.rlkit-sketch text {{ fill: var(--rlkit-soft); font: 11px system-ui, sans-serif; }}
.rlkit-sketch p, .rlkit-sketch figcaption {{ margin: 2px 0; font-size: 12px; line-height: 1.4; }}
.rlkit-sketch p, .rlkit-sketch figcaption {{ color: var(--rlkit-soft); }}
.rlkit-sketch p span {{ margin-right: 14px; white-space: nowrap; }}
.rlkit-sketch p svg {{ display: inline-block; width: 22px; height: 8px; margin-right: 5px; vertical-align: middle; }}
</style>"""


@dataclass(frozen=True)
class _Frame:
    """What of the figure's plane is shown, and where in the view box."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: Numbers) -> Numbers:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: Numbers) -> Numbers:
        return HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - _TOP - _BOTTOM)


def sketch(figure: go.Figure) -> str:
    """One `<figure>` with title, legend, SVG and caption; the style comes once a page (`STYLE`)."""
    layout, traces = figure.layout, list(figure.data)
    alt = escape(str((layout.meta or {}).get("alt", "")))
    title = escape(str(layout.title.text or ""))
    if not traces:  # its one line of text is the caption, too
        return f'<figure class="rlkit-sketch"><h3>{title}</h3><figcaption>{alt}</figcaption></figure>'
    drawn = f"{_legend(traces)}{_plot(figure, traces, alt)}"
    return (
        f'<figure class="rlkit-sketch"><h3>{title}</h3>{drawn}'
        f'<figcaption aria-hidden="true">{alt.replace(" %", "&nbsp;%")}</figcaption></figure>'
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within `low` to `high`, `about` as many.

    >>> ticks(0, 50, 5)
    [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    >>> ticks(0.985, 1.015, 4)
    [0.99, 1.0, 1.01]
    """
    rough = (high - low) / max(1, about)
    if not math.isfinite(rough) or rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(n * step, digits) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def thin(x: Numbers, y: Numbers, most: int = MOST_POINTS) -> tuple[Numbers, Numbers]:
    """At most about `most` points that look the same: of each stretch the lowest and the highest, and every gap.

    >>> thin(np.arange(6.0), np.array([0.0, 9, 1, 2, -5, 3]), most=4)
    (array([0., 1., 4., 5.]), array([ 0.,  9., -5.,  3.]))
    """
    if len(x) <= most:
        return x, y
    kept: list[int] = []
    for part in np.array_split(np.arange(len(x)), most // 2):
        values = y[part]
        if np.isnan(values).all():
            kept.append(int(part[0]))
            continue
        kept += sorted({int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])})
    return x[kept], y[kept]


def _plot(figure: go.Figure, traces: Sequence[Any], alt: str) -> str:
    lines = [(trace, _array(trace.x), _array(trace.y)) for trace in traces]
    frame = _shown(figure, lines)
    parts = [_axes(frame, str(figure.layout.xaxis.title.text or ""))]
    for band in figure.layout.shapes:
        if band.type == "rect" and band.fillcolor:
            top, bottom = frame.y(np.array([band.y1, band.y0], dtype=float))
            parts.append(
                f'<rect x="{_LEFT}" width="{WIDTH - _LEFT - _RIGHT}" y="{top:.1f}" height="{bottom - top:.1f}"'
                f' fill="{band.fillcolor}" opacity="0.2"/>'
            )
    below: Numbers | None = None
    for trace, x, y in lines:
        if trace.stackgroup:
            below = np.zeros_like(y) if below is None else below
            parts.append(_layer(frame, x, below, below + np.nan_to_num(y), trace.fillcolor))
            below = below + np.nan_to_num(y)
        else:
            parts.append(_line(frame, *thin(x, y), trace))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">{"".join(parts)}</svg>'


def _shown(figure: go.Figure, lines: Iterable[tuple[Any, Numbers, Numbers]]) -> _Frame:
    stacked = [y for trace, _, y in lines if trace.stackgroup]
    plain = [y for trace, _, y in lines if not trace.stackgroup]
    tops = [*plain, *([np.nansum(np.vstack(stacked), axis=0)] if stacked else [])]
    finite = np.concatenate([top[np.isfinite(top)] for top in tops]) if tops else np.array([])
    x0, x1 = (float(value) for value in figure.layout.xaxis.range)
    if figure.layout.yaxis.range:
        y0, y1 = (float(value) for value in figure.layout.yaxis.range)
    else:
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        y0, y1 = min(0.0, low), 1.06 * max(high, 0.0)
    return _Frame(x0, x1 if x1 > x0 else x0 + 1, y0, y1 if y1 > y0 else y0 + 1)


def _axes(frame: _Frame, x_title: str) -> str:
    parts = []
    for value in ticks(frame.y0, frame.y1, _TICKS[1]):
        at = float(frame.y(np.array(value)))
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--rlkit-rule)"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:,.6g}</text>'
        )
    shown = [value for value in ticks(frame.x0, frame.x1, _TICKS[0]) if value.is_integer() or frame.x1 - frame.x0 < 3]
    for value in shown:
        at = float(frame.x(np.array(value)))
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 13}" text-anchor="middle">{value:,.6g}</text>')
    title = escape(x_title)
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{title}</text>')
    return "".join(parts)


def _line(frame: _Frame, x: Numbers, y: Numbers, trace: Any) -> str:
    if trace.line.shape == "hvh":
        x, y = _as_steps(x, y)
    px, py = frame.x(x), frame.y(y)
    path, open_ = [], False
    for a, b in zip(px, py, strict=True):
        if not math.isfinite(b):
            open_ = False
            continue
        path.append(f"{'L' if open_ else 'M'}{a:.1f} {b:.1f}")
        open_ = True
    dots = ""
    if "markers" in (trace.mode or ""):
        size = float(trace.marker.size or 4) / 2
        dots = "".join(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{size:g}" fill="{_ink(trace.line.color)}"/>'
            for a, b in zip(px, py, strict=True)
            if math.isfinite(b)
        )
    return f'<path d="{"".join(path)}" fill="none"{_stroke(trace)}/>{dots}'


def _layer(frame: _Frame, x: Numbers, low: Numbers, high: Numbers, colour: str) -> str:
    if len(x) > WIDTH:  # of more steps than pixels each pixel's mean: what the eye would make of it
        parts = np.array_split(np.arange(len(x)), WIDTH // 2)
        x, low, high = (np.array([values[part].mean() for part in parts]) for values in (x, low, high))
    xs, highs = _as_steps(x, high)
    _, lows = _as_steps(x, low)
    edge = [*zip(xs, highs, strict=True), *reversed(list(zip(xs, lows, strict=True)))]
    points = " ".join(f"{frame.x(np.array(a)):.1f},{frame.y(np.array(b)):.1f}" for a, b in edge)
    return f'<polygon points="{points}" fill="{_ink(colour)}"/>'


def _as_steps(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Each value from halfway to its neighbour before to halfway to the one behind it."""
    if len(x) < 2:
        return np.array([x[0] - 0.5, x[0] + 0.5]), np.array([y[0], y[0]])
    middle = (x[1:] + x[:-1]) / 2
    edges = np.concatenate([[x[0]], np.repeat(middle, 2), [x[-1]]])
    return edges, np.repeat(y, 2)


def _legend(traces: Sequence[Any]) -> str:
    items = []
    for trace in traces:
        if trace.stackgroup:
            swatch = f'<rect width="22" height="8" fill="{_ink(trace.fillcolor)}"/>'
        else:
            swatch = f'<path d="M0 4H22" fill="none"{_stroke(trace)}/>'
        name = escape(str(trace.name))
        items.append(f'<span><svg viewBox="0 0 22 8" aria-hidden="true">{swatch}</svg>{name}</span> ')
    return f"<p>{''.join(items)}</p>"


def _stroke(trace: Any) -> str:
    dash = _DASHES.get(trace.line.dash or "")
    width = min(2.5, float(trace.line.width or 2.0))
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f' stroke="{_ink(trace.line.color)}" stroke-width="{width:g}"{dashes}'


def _ink(colour: str) -> str:
    """Blue is too dark for thin lines on a dark page, and becomes a colour of the page's."""
    return "var(--rlkit-blue)" if colour == BLUE else escape(colour)


def _array(values: Any) -> Numbers:
    return np.array([math.nan if value is None else float(value) for value in values])
