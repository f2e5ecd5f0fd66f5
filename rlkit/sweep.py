"""A sweep as data: a grid of recipe fields and notebook parameters in, checked points out, and which to start next.

    recipe: ../local.yaml             # relative to the grid's own file
    notebook: ../../notebooks/point.ipynb  # left out: this one, which runs the recipe and shows its verdict
    grid:                             # every combination
      rollout.max_inflight_tasks: [32, 64]
      serve.replicas: [1, 2]
    points:                           # and these
      - {rollout.queue_maxsize: 96}
    seeds: [0, 1]                     # every point with each
    steps: 20
    limits: {jobs: 2, usd: 30}

Pure, but for `load_sweep`, which reads the files it is given. A point is known by its content: the recipe, the notebook
and its parameters, and rlkit's version. The same content is the same point, wherever it stands in the grid.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlkit import __version__
from rlkit.engines.hf_purse import unbounded
from rlkit.errors import BadInput
from rlkit.notebook_parameters import checked_parameters, declared_parameters
from rlkit.recipe import Recipe, parse_recipe
from rlkit.recipe_layers import Layer, is_grid, merge_layers, parse_yaml, printable, read_layers
from rlkit.refusals import refusals, shown

POINT_NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "point.ipynb"

# What the total of a sweep's rented points is called where it is set.
TOTAL = "limits.usd"

# The parameters that the sweep itself gives to the notebook of a point.
OWN_PARAMETERS = ("recipe", "folder")

# Nobody reads the reports of more, and a grid of six fields with ten values each is a typing mistake.
MAX_POINTS = 10_000

# What a file begins with that is a recipe.
_RECIPE_WORDS = {"extends", *Recipe.model_fields}
_SECTIONS = {name for name, field in Recipe.model_fields.items() if "Section" in str(field.annotation)}
_KEY_DIGITS = 10  # of sixteen possibilities each: 10^4 different points collide with a probability of 5e-5


class Limits(BaseModel):
    """How much at once, and for how much."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    jobs: Annotated[int, Field(gt=0)] | None = None  # points at once; None: by engine, see `parallel`
    usd: Annotated[float, Field(gt=0)] | None = None  # for all points on rented hardware together


class SweepFile(BaseModel):
    """What a grid's file may say."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    recipe: Annotated[str, Field(min_length=1)]
    notebook: Annotated[str, Field(min_length=1)] | None = None
    grid: dict[str, list[Any]] = {}
    points: list[dict[str, Any]] = []
    seeds: list[Annotated[int, Field(ge=0)]] = []
    steps: Annotated[int, Field(gt=0)] | None = None
    limits: Limits = Limits()


@dataclass(frozen=True)
class Point:
    """One run of the notebook. `values` are what the grid gave it, recipe fields and parameters alike."""

    number: int  # from 1, in the order of the grid
    values: dict[str, Any]
    recipe: Recipe
    parameters: dict[str, Any]
    key: str
    label: str = ""  # what tells it from the others, on one line

    @property
    def name(self) -> str:
        """The name of its folder: the recipe's, and its content."""
        return f"{self.recipe.name}-{self.key}"


@dataclass(frozen=True)
class Sweep:
    """All points of a grid, checked."""

    name: str
    base: Recipe
    notebook: Path
    fields: tuple[str, ...]  # that differ between points, in the order of the grid
    points: tuple[Point, ...]
    limits: Limits

    def limited(self, jobs: int) -> Sweep:
        """The same with so many points at once."""
        return replace(self, limits=self.limits.model_copy(update={"jobs": jobs}))


def load_sweep(path: Path) -> Sweep:
    """Read a grid's file with its recipe and notebook. Raises BadInput in one line, before anything starts."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise BadInput(f"{printable(path)}: cannot read the grid: {reason}") from None
    try:
        data = parse_yaml(text)
    except BadInput as error:
        raise BadInput(f"{printable(path)}: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{printable(path)}: a grid is a mapping with `recipe` and `grid` or `points`")
    if not is_grid(data) and not _RECIPE_WORDS.isdisjoint(data):
        run = printable(shlex.join(["rlkit", "run", str(path)]))
        raise BadInput(
            f"{printable(path)}: a recipe, not a grid; `{run}` runs it, and a grid names it (`recipe:` and `grid:`, as"
            " in runs/sweeps/in-flight.yaml)"
        )
    return plan_sweep(data, path.parent, printable(path), path.stem)


def plan_sweep(data: Mapping[str, Any], folder: Path, source: str = "sweep", name: str = "sweep") -> Sweep:
    """The points of a grid given as data; its files are relative to `folder`. Raises BadInput naming `source`.

    Values may be numpy's scalars and arrays, tuples and paths: they become what YAML could have held.
    """
    try:
        given = SweepFile.model_validate(plain(dict(data), source))
    except ValidationError as error:
        told = [f"{field}: {what}" if field else what for field, what in refusals(error, SweepFile)]
        raise BadInput(f"{source}: {'; '.join(told)}") from None
    notebook = POINT_NOTEBOOK if given.notebook is None else folder / given.notebook
    declared = _declared(notebook, source)
    layers = read_layers(folder / given.recipe)
    base = _recipe(layers, {}, str(folder / given.recipe))
    combined = list(_combinations(given, source))
    for field in dict.fromkeys(name for values in combined for name in values):
        _check_name(field, declared, notebook, source)
    kept: dict[str, Point] = {}
    content = _digest(notebook.read_bytes())
    for values in combined:
        recipe, parameters = _of(values, layers, given, source, len(kept) + 1)
        _check_types(notebook, parameters, source)
        key = point_key(recipe, parameters, content)
        kept.setdefault(key, Point(len(kept) + 1, values, recipe, parameters, key))
    fields = varied_fields([point.values for point in kept.values()])
    points = tuple(replace(point, label=label(point.values, fields)) for point in kept.values())
    _check_budget(points, given.limits, source)
    return Sweep(name, base, notebook, fields, points, given.limits)


def varied_fields(combined: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names that do not have one value in all points, in the order in which they come up; a point may lack one."""
    names = dict.fromkeys(name for values in combined for name in values)
    absent = object()

    def seen(name: str) -> set[str]:
        return {repr(values.get(name, absent)) for values in combined}

    return tuple(name for name in names if len(seen(name)) > 1)


def label(values: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The values of these fields on one line."""
    return ", ".join(f"{name}={plain_words(values[name])}" for name in fields if name in values) or "as it is"


def point_key(recipe: Recipe, parameters: Mapping[str, Any], notebook: str) -> str:
    """What a point's content comes to: the recipe, the notebook (its own digest), its parameters, rlkit's version."""
    content = [recipe.to_dict(), dict(parameters), notebook, __version__]
    return _digest(json.dumps(content, sort_keys=True).encode())[:_KEY_DIGITS]


def plain(value: Any, source: str) -> Any:
    """A value as YAML could have held it. Raises BadInput for what has no such form.

    Example:
        >>> plain({"a": (1, Path("b")), "c": "007"}, "here")
        {'a': [1, 'b'], 'c': '007'}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item, source) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    for convert in ("tolist", "item"):  # numpy's arrays and scalars; a scalar has both
        if hasattr(value, convert) and type(value).__module__.split(".")[0] in ("numpy", "pandas"):
            return plain(getattr(value, convert)(), source)
    raise BadInput(f"{source}: {shown(value)}: a {type(value).__name__} is no value of a recipe or a parameter")


def plain_words(value: Any) -> str:
    """A value as a table or a label has it: YAML's words, text as it is."""
    return value if isinstance(value, str) else shown(value)


def is_field(name: str) -> bool:
    """Whether a name in a grid means a field of the recipe rather than a parameter of the notebook."""
    return "." in name or name in Recipe.model_fields


def parallel(engine: str, limits: Limits, cores: int) -> int:
    """How many points of an engine may run at once: `jobs`, or a simulation for each core and one of anything else.

    A local run has a trainer and replicas that share this machine; on Jobs each one costs money while it runs.
    """
    if limits.jobs is not None:
        return limits.jobs
    return cores if engine == "sim" else 1


def next_point(waiting: Sequence[Point], running: Sequence[Point], limits: Limits, cores: int) -> Point | None:
    """The first waiting point whose engine has room for one more; None when none has."""
    busy: list[str] = [point.recipe.engine for point in running]

    def has_room(engine: str) -> bool:
        return busy.count(engine) < parallel(engine, limits, cores)

    return next((point for point in waiting if has_room(point.recipe.engine)), None)


def _combinations(given: SweepFile, source: str) -> Iterable[dict[str, Any]]:
    """Every point's values: the grid's product, the listed points after it, each with every seed."""
    if not given.grid and not given.points and not given.seeds:
        raise BadInput(f"{source}: nothing to vary, give grid, points or seeds")
    empty = next((field for field, values in given.grid.items() if not values), None)
    if empty is not None:
        raise BadInput(f"{source}: grid: {empty}: expected at least one value")
    size = len(given.points) + (given.grid != {}) * _product(map(len, given.grid.values()))
    if size * max(len(given.seeds), 1) > MAX_POINTS:
        raise BadInput(f"{source}: {size * max(len(given.seeds), 1):,} points, at most {MAX_POINTS:,} are run")
    rows: list[dict[str, Any]] = []
    if given.grid:
        rows += [dict(zip(given.grid, row, strict=True)) for row in itertools.product(*given.grid.values())]
    rows += given.points
    for row in rows or [{}]:
        if given.seeds and "train.seed" in row:
            raise BadInput(f"{source}: train.seed: give it in the grid or as seeds, not both")
        if given.steps is not None and "train.steps" in row:
            raise BadInput(f"{source}: train.steps: give it in the grid or as steps, not both")
        yield from [row | {"train.seed": seed} for seed in given.seeds] or [row]


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _check_name(field: str, declared: Mapping[str, str], notebook: Path, source: str) -> None:
    if field in OWN_PARAMETERS:
        raise BadInput(f"{source}: {field}: the sweep gives each point its own")
    if field in _SECTIONS:
        raise BadInput(f"{source}: {field}: is a section of the recipe, name a field of it ({field}.…)")
    if not is_field(field) and field not in declared:
        others = [name for name in declared if name not in OWN_PARAMETERS]
        known = f"its parameters: {', '.join(others)}" if others else "it has no parameters of its own"
        raise BadInput(f"{source}: {field}: neither a field of the recipe nor a parameter of {notebook.name} ({known})")


def _of(
    values: Mapping[str, Any], layers: list[Layer], given: SweepFile, source: str, number: int
) -> tuple[Recipe, dict[str, Any]]:
    """A point's recipe and its parameters."""
    changes: dict[str, Any] = {} if given.steps is None else {"train": {"steps": given.steps}}
    for name in filter(is_field, values):
        section = changes
        *path, last = name.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = values[name]
    return _recipe(layers, changes, f"{source}: point {number}"), {
        name: value for name, value in values.items() if not is_field(name)
    }


def _recipe(layers: list[Layer], changes: dict[str, Any], source: str) -> Recipe:
    return parse_recipe(merge_layers([*layers, (source, changes)]), source)


def _declared(notebook: Path, source: str) -> dict[str, str]:
    declared = declared_parameters(notebook)
    missing = [name for name in OWN_PARAMETERS if name not in declared]
    if missing:
        raise BadInput(f"{source}: notebook: {notebook} has no parameter {missing[0]}; a point needs recipe and folder")
    return declared


def _check_types(notebook: Path, parameters: Mapping[str, Any], source: str) -> None:
    try:
        checked_parameters(notebook, dict(parameters))
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None


def _check_budget(points: Sequence[Point], limits: Limits, source: str) -> None:
    rented = {f"point {point.number}": point.recipe for point in points if point.recipe.engine == "hf"}
    problem = unbounded(rented, f"{len(rented)} points", limits.usd, TOTAL)
    if problem is not None:
        raise BadInput(f"{source}: {problem}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
