"""The form of notebook 01: choose or edit a recipe, see what would go wrong and what it takes, start it, watch it.

ipywidgets around `rlkit.launch_plan`, `rlkit.engines.background` and `rlkit.live_view`; nothing is decided here.
A headless run sees the same page as plain HTML.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from rlkit.engines.background import start_in_background
from rlkit.errors import RlkitError
from rlkit.launch_plan import (
    FIELDS,
    Plan,
    assignments,
    consider,
    field_text,
    foresee,
    plan_html,
    prediction_html,
    recipes_under,
)
from rlkit.live_source import FolderSource
from rlkit.live_view import LiveView
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder

_CHOICES = {"engine": ("local", "hf", "sim"), "cap.policy": ("rlkit", "published", "none")}
# The longest published run takes 5 s to simulate on a busy core.
PREDICTION_TIMEOUT_S = 60.0
_WIDE = {"description_width": "200px"}


class LaunchForm(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """A recipe's fields on the left, what they would lead to on the right, and below it the run once it is started."""

    def __init__(self, recipe: str, overrides: Sequence[str], folder: str, predicting: bool = True) -> None:
        self._given, self._overrides, self._predicting = Path(recipe), list(overrides), predicting
        self._turn, self._filling = 0, False
        self._thread: threading.Thread | None = None
        load_recipe(self._given, self._overrides)  # what is wrong with the parameters is said at once
        self.plan: Plan = Plan(None, "nothing was looked at yet", ())
        self.view: LiveView | None = None
        known = {str(path): path for path in [self._given, *recipes_under(_runs_above(self._given))]}
        self._recipe = widgets.Dropdown(options=known, value=self._given, description="Recipe", style=_WIDE)
        self._folder = _text("Run's folder", folder)
        self._fields = {name: self._field(name) for name in FIELDS}
        self._more = widgets.Textarea(
            description="Other changes", placeholder="field=value, one a line", style=_WIDE, continuous_update=False
        )
        self._start = widgets.Button(description="Start the run", button_style="primary", layout={"width": "auto"})
        self._start.on_click(self._on_start)
        self._pay = widgets.Button(button_style="warning", layout={"width": "auto"})
        self._pay.on_click(self._on_pay)
        self._leave = widgets.Button(description="Do not start", layout={"width": "auto"})
        self._leave.on_click(lambda _: self._withdraw("Nothing was started."))
        self._question = widgets.HBox([self._pay, self._leave], layout={"display": "none"})
        self._said, self._about, self._ahead = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._fill()
        for one in (self._folder, self._more, *self._fields.values()):
            one.observe(self._on_change, "value")
        self._recipe.observe(self._on_recipe, "value")
        for one in (self._recipe, self._folder, self._more, *self._fields.values()):
            one.layout.width = "420px"
        below = [self._more, self._folder, self._start, self._said, self._question]
        # As wide as its fields: a long sentence below them must not push the other column away.
        left = widgets.VBox([self._recipe, *self._fields.values(), *below], layout={"width": "430px"})
        right = widgets.VBox([self._about, self._ahead], layout={"flex": "1 1 420px", "min_width": "0"})
        self._below = widgets.VBox([])
        both = widgets.HBox([left, right], layout={"flex_flow": "row wrap", "grid_gap": "8px 32px"})
        super().__init__([both, self._below])
        self._consider()

    @property
    def folder(self) -> str:
        """Where the run goes."""
        return str(self._folder.value)

    @property
    def started(self) -> bool:
        """Whether a run was started from this form."""
        return self.view is not None

    def _fill(self) -> None:
        """The fields of the chosen recipe; the changes that came with the form hold for the recipe that did."""
        mine = self._overrides if self._recipe.value == self._given else []
        known = load_recipe(self._recipe.value, mine)
        self._filling = True
        for name, field in self._fields.items():
            field.value = field_text(known, name)
        self._more.value = "\n".join(line for line in mine if line.partition("=")[0].strip() not in FIELDS)
        self._filling = False

    def _consider(self) -> None:
        self._turn += 1
        self._withdraw()  # a price that was asked for is another recipe's
        base = load_recipe(self._recipe.value)
        changes = assignments(base, {name: str(one.value) for name, one in self._fields.items()}, self._more.value)
        self.plan = consider(self._recipe.value, changes, Path(self.folder))
        self._about.value = plan_html(self.plan)
        self._start.disabled = not self.plan.ready or self._goes_on()
        if self.plan.recipe is None or not self._predicting:
            self._ahead.value = ""
            return
        self._ahead.value = "<p>Predicting how long it would take…</p>"
        self._thread = threading.Thread(target=self._predict, args=(self._turn, self.plan), daemon=True)
        self._thread.start()

    def _predict(self, turn: int, plan: Plan) -> None:
        assert plan.recipe is not None
        shown = prediction_html(foresee(plan.recipe))
        if turn == self._turn:  # nothing was changed meanwhile
            self._ahead.value = shown

    def _goes_on(self) -> bool:
        look = self.view.last if self.view is not None else None
        return look is not None and look.going_on

    def _on_recipe(self, _: object) -> None:
        try:
            self._fill()
            self._consider()
        except RlkitError as error:
            self._tell(str(error))

    def _on_change(self, _: object) -> None:
        if self._filling:
            return
        try:
            self._consider()
        except RlkitError as error:
            self._tell(str(error))

    def _on_start(self, _: object) -> None:
        if self.plan.recipe is None:
            return
        self._start.disabled = True
        if self.plan.recipe.engine == "hf":
            self._ask(self.plan.recipe)
        else:
            self._begin(self.plan.recipe)

    def _ask(self, recipe: Recipe) -> None:
        """Say what rented hardware costs, beside the button that agrees to it."""
        from rlkit.engines.hf_offer import in_short, offer  # the Hub's client takes seconds to import

        self._tell("Asking the Hub what it costs…")
        try:
            price = offer(recipe)
        except RlkitError as error:
            self._withdraw(str(error))
            return
        self._tell(f"This rents hardware: {price}. Nothing is started yet.")
        self._pay.description = f"Start for {in_short(price)}"
        self._question.layout.display = "flex"

    def _on_pay(self, _: object) -> None:
        if self._question.layout.display == "none" or self.plan.recipe is None:
            return
        self._question.layout.display = "none"
        self._begin(self.plan.recipe, is_agreed=True)

    def _withdraw(self, text: str = "") -> None:
        """Take the question back; `text` says why."""
        self._question.layout.display = "none"
        if text:
            self._tell(text)
            self._start.disabled = not self.plan.ready or self._goes_on()

    def _begin(self, recipe: Recipe, is_agreed: bool = False) -> None:
        folder = RunFolder(Path(self.folder))
        try:
            child = start_in_background(recipe, folder, is_agreed=is_agreed)
        except RlkitError as error:
            self._tell(str(error))
            self._start.disabled = False
            return
        self._tell(f"Started in {folder.path}; it is shown below.")
        self.view = LiveView(FolderSource(folder, child))
        self._below.children = [self.view]
        self.view.watch(lambda: self._on_change(None))  # the folder holds a run now, and another may be started

    def _tell(self, text: str) -> None:
        self._said.value = f'<p role="status">{escape(text)}</p>'

    def _field(self, name: str) -> widgets.DOMWidget:
        if name in _CHOICES:
            return widgets.Dropdown(options=_CHOICES[name], description=name, style=_WIDE)
        return _text(name, "")

    def _repr_mimebundle_(self, **options: Any) -> Mapping[str, Any]:
        bundle = dict(super()._repr_mimebundle_(**options) or {})
        if self._thread is not None:  # what is saved must not say that it is still predicting
            self._thread.join(PREDICTION_TIMEOUT_S)
        return bundle | {"text/html": f"{self._about.value}{self._ahead.value}"}


def _text(label: str, value: str) -> widgets.Text:
    return widgets.Text(value=value, description=label, style=_WIDE, continuous_update=False)


def _runs_above(recipe: Path) -> Path:
    """The folder `runs` that holds the recipe, else the recipe's own."""
    return next((parent for parent in recipe.parents if parent.name == "runs"), recipe.parent)
