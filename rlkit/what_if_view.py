"""Sliders over a recipe's settings, and what they lead to: ipywidgets around `rlkit.what_if`, which decides everything.

A slider that moves is waited for until it rests; then one thread predicts, shows, and fills the front in with the
choices next to it. What is saved with the notebook, and all that a headless run shows, is the last state as plain HTML.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from rlkit.chart import BLUE, GREY, VERMILLION
from rlkit.display import headline, shares
from rlkit.errors import RlkitError
from rlkit.recipe import load_recipe, recipe_diff
from rlkit.what_if import WORDS, Choice, Predicted, WhatIf, cost, front
from rlkit.wording import number, percent

# A hand on a slider passes a value in less; who has stopped does not notice it.
REST_S = 0.25

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 300, 64, 14, 16, 40
_ROOM = 1.12  # of an axis beyond its last point
_TEXT = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'

# noUiSlider's handles have no name of their own: they get the text of the label beside them, and the value as words.
_NAME_SLIDERS = """
(() => {
  const name = () => document.querySelectorAll('.rlkit-what-if .widget-slider').forEach(slider => {
    const label = slider.querySelector('.widget-label'), value = slider.querySelector('.widget-readout');
    slider.querySelectorAll('.noUi-handle').forEach(handle => {
      const said = value ? value.textContent : '';
      if (label && handle.getAttribute('aria-label') !== label.textContent)
        handle.setAttribute('aria-label', label.textContent);
      if (handle.getAttribute('aria-valuetext') !== said) handle.setAttribute('aria-valuetext', said);
    });
  });
  new MutationObserver(name).observe(document.body, {childList: true, subtree: true, characterData: true});
  name();
})();
"""


def what_if(recipe: str, overrides: Sequence[str] = ()) -> WhatIfView:
    """A recipe's file with sliders. Raises BadInput for a recipe that cannot be read or simulated."""
    return WhatIfView(WhatIf(load_recipe(recipe, list(overrides))))


class WhatIfView(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """A slider a setting, and beside them the predicted step, time, cost and verdict with the front."""

    def __init__(self, model: WhatIf, rest_s: float = REST_S) -> None:
        self.model, self._rest_s = model, rest_s
        self._turn = 0
        self._guard = threading.Lock()  # one prediction at a time: the machine may have two cores
        self._timer: threading.Timer | None = None
        self.sliders = {name: self._slider(name, values) for name, values in model.options.items()}
        self._reset = widgets.Button(description="Back to the recipe", layout={"width": "auto"})
        self._reset.on_click(self._on_reset)
        self.verdict, self.figures, self.front = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.said = widgets.HTML()
        left = widgets.VBox([*self.sliders.values(), self._reset, self.said], layout={"flex": "0 1 460px"})
        right = widgets.VBox([self.verdict, self.figures, self.front], layout={"flex": "1 1 420px", "min_width": "0"})
        super().__init__([widgets.HBox([left, right], layout={"flex_flow": "row wrap", "grid_gap": "8px 32px"})])
        self.add_class("rlkit-what-if")
        self.show(self.choice)

    @property
    def choice(self) -> Choice:
        """What the sliders say."""
        return self.model.changed(self.model.start, {name: slider.value for name, slider in self.sliders.items()})

    def show(self, choice: Choice) -> None:
        """Predict a choice and show it with the front of all that is known."""
        try:
            found = self.model.predict(choice)
        except RlkitError as error:
            self._say(f"This cannot be simulated: {error}")
            return
        start = self.model.predict(self.model.start)
        self.verdict.value = _text(headline(found.verdict)) + _text(shares(found.verdict))
        self.figures.value = figures_html(found, start, self._changes(choice))
        self._draw(found)
        self._say("")

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until what a slider set off is shown."""
        timer = self._timer
        if timer is not None:
            timer.join(timeout_s)

    def _slider(self, name: str, values: Sequence[float]) -> Any:
        slider = widgets.SelectionSlider(
            options=[(f"{value:,}", value) for value in values],
            value=getattr(self.model.start, name),
            description=WORDS[name],
            continuous_update=False,
            style={"description_width": "180px"},
            layout={"width": "440px", "max_width": "100%"},
        )
        slider.observe(self._on_change, "value")
        return slider

    def _on_change(self, _: object) -> None:
        self._turn += 1
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._rest_s, self._predict, [self._turn])
        self._timer.daemon = True
        self._timer.start()
        self._say("Predicting …")

    def _predict(self, turn: int) -> None:
        with self._guard:
            choice = self.choice
            if turn == self._turn:
                self.show(choice)
            for other in self.model.neighbours(choice):
                if turn != self._turn:
                    return
                try:
                    self.model.predict(other)
                except RlkitError:
                    continue
                self._draw(self.model.predict(choice))

    def _on_reset(self, _: object) -> None:
        for name, slider in self.sliders.items():
            slider.value = getattr(self.model.start, name)

    def _draw(self, found: Predicted) -> None:
        known = [one for one in self.model.known.values() if isinstance(one, Predicted)]
        self.front.value = front_svg(known, found, self.model.predict(self.model.start))

    def _changes(self, choice: Choice) -> list[str]:
        changed = recipe_diff(self.model.recipe, self.model.recipe_of(choice))
        return [f"{name}={value}" for name, _, value in changed]

    def _say(self, text: str) -> None:
        self.said.value = f'<p role="status">{escape(text)}</p>'

    def _ipython_display_(self) -> None:
        page = self.verdict.value + self.figures.value + self.front.value
        bundle = dict(self._repr_mimebundle_() or {})
        display(bundle | {"text/html": page}, raw=True)  # type: ignore[no-untyped-call]
        display({"application/javascript": _NAME_SLIDERS}, raw=True)  # type: ignore[no-untyped-call]


def figures_html(found: Predicted, start: Predicted, changes: Sequence[str]) -> str:
    """Step, time, cost, staleness and waste of a choice beside the recipe's own, and the change as `--set` takes it."""
    rows = [
        ("Step", f"{number(found.step_s)} s", _against(found.step_s, start.step_s)),
        ("Whole run", f"{number(found.minutes)} min", _against(found.minutes, start.minutes)),
        ("Cost", "no price known" if found.usd is None else f"${found.usd:,.2f}", _against(found.usd, start.usd)),
        ("Staleness, versions", number(found.staleness), _against(found.staleness, start.staleness)),
        ("Dropped as too old", percent(found.dropped_over_trained), ""),
        ("Preemptions a request", number(found.preemptions_per_request), ""),
    ]
    body = "".join(f"<tr><th scope='row'>{name}</th><td>{value}</td><td>{than}</td></tr>" for name, value, than in rows)
    sets = " ".join(f"--set {change}" for change in changes) or "the recipe as it is"
    return (
        '<table class="rlkit"><thead><tr><th>Predicted</th><th>With these settings</th><th>Than the recipe</th></tr>'
        f"</thead><tbody>{body}</tbody></table><p><code>{escape(sets)}</code></p>"
    )


def front_svg(known: Iterable[Predicted], found: Predicted, start: Predicted) -> str:
    """Time and cost of all that was predicted, their front, the choice and the recipe, with the finding in words."""
    points = list(known)
    best = front(points)
    unit = "replicas" if found.usd is None else "USD"
    x_most = max(one.minutes for one in points) * _ROOM
    y_most = max(cost(one) for one in points) * _ROOM

    def x(one: Predicted) -> float:
        return _LEFT + one.minutes / x_most * (_WIDTH - _LEFT - _RIGHT)

    def y(one: Predicted) -> float:
        return _HEIGHT - _BOTTOM - cost(one) / y_most * (_HEIGHT - _TOP - _BOTTOM)

    on_it = any(one.choice == found.choice for one in best)
    said = (
        f"{number(found.minutes)} minutes and {number(cost(found))} {unit}: "
        f"{'on' if on_it else 'behind'} the front of {len(best)} among {len(points)} predictions, from "
        f"{number(best[0].minutes)} minutes at {number(cost(best[0]))} {unit} to {number(best[-1].minutes)} minutes at "
        f"{number(cost(best[-1]))} {unit}."
    )
    dots = "".join(f'<circle cx="{x(one):.1f}" cy="{y(one):.1f}" r="3.5" fill="{GREY}"/>' for one in points)
    steps = f"M{x(best[0]):.1f} {y(best[0]):.1f}" + "".join(f"H{x(one):.1f}V{y(one):.1f}" for one in best[1:])
    recipe = f'<rect x="{x(start) - 6:.1f}" y="{y(start) - 6:.1f}" width="12" height="12" fill="none" stroke="{BLUE}" '
    here = f'<circle cx="{x(found):.1f}" cy="{y(found):.1f}" r="8" fill="none" stroke="{VERMILLION}" stroke-width="3"/>'
    return (
        f'<figure style="margin: 8px 0"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{said}"'
        f' style="width: 100%; max-width: {_WIDTH}px; height: auto">{_axes(x_most, y_most, unit)}'
        f'<path d="{steps}" fill="none" stroke="{GREY}" stroke-width="2" stroke-dasharray="6 4"/>{dots}'
        f'{recipe}stroke-width="2"/>{here}</svg><figcaption>{said} Circle: these settings; square: the recipe; dashes:'
        " the front.</figcaption></figure>"
    )


def _axes(x_most: float, y_most: float, unit: str) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="currentColor" opacity="0.5"/>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        across = _LEFT + share * (right - _LEFT)
        up = bottom - share * (bottom - _TOP)
        parts += [
            f'<text x="{across:.0f}" y="{bottom + 16}" text-anchor="middle" {_TEXT}>{number(share * x_most)}</text>',
            f'<text x="{_LEFT - 8}" y="{up + 4:.0f}" text-anchor="end" {_TEXT}>{number(share * y_most)}</text>',
        ]
    parts.append(f'<text x="{right}" y="{_HEIGHT - 4}" text-anchor="end" {_TEXT}>Minutes of the whole run</text>')
    parts.append(f'<text x="{_LEFT + 8}" y="{_TOP + 8}" {_TEXT}>{unit}</text>')
    return "".join(parts)


def _against(value: float | None, start: float | None) -> str:
    if value is None or not start:
        return ""
    change = value / start - 1
    return "the same" if abs(change) < 0.005 else f"{abs(100 * change):.0f} % {'more' if change > 0 else 'less'}"


def _text(html: Any) -> str:
    data: Mapping[str, str] | str = html.data
    return str(data)
