"""What a recipe is written in: files that extend one another, and `--set`, each a layer over those before it.

Plain data in and out; whether the fields exist and their values fit is `rlkit.recipe`'s business.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlkit.errors import BadInput
from rlkit.refusals import shown

# Who wrote it (a file, --set), and the data.
Layer = tuple[str, dict[str, Any]]

# What only the file of a sweep says (`rlkit.sweep`).
_GRID_WORDS = frozenset({"recipe", "grid", "points"})

_ABSENT = object()


def read_layers(path: Path) -> list[Layer]:
    """A recipe file with all that it extends, the base first. Raises BadInput."""
    return _read_layers(path, [], None)


def merge_layers(layers: list[Layer]) -> dict[str, Any]:
    """All layers as one: a section is merged field by field, any other value replaced."""
    data: dict[str, Any] = {}
    for _, layer in layers:
        data = _merge(data, layer)
    return copy.deepcopy(data)


def assign(data: dict[str, Any], assignment: str) -> Layer:
    """Change `data` as `a.b=value` says, the value read as YAML; the change alone as a layer. Raises BadInput."""
    assignment = printable(assignment)
    name, separator, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not separator or not all(parts):
        raise BadInput(f"--set {assignment}: expected field=value, for example train.steps=100")
    try:
        value = parse_yaml(text) if text else ""
    except BadInput:
        raise BadInput(f"--set {assignment}: {text!r} is not a YAML value") from None
    for part in parts[:-1]:
        if data.get(part) is None:
            data[part] = {}
        if not isinstance(data[part], dict):
            raise BadInput(f"--set {assignment}: {part} is a value, not a section")
        data = data[part]
    data[parts[-1]] = value
    change: Any = value
    for part in reversed(parts):
        change = {part: change}
    return "--set", change


def source_of(field: str, layers: list[Layer], otherwise: str) -> str:
    """Who wrote a dotted field: the last layer that has it, or has the section in which it is missing."""
    parts = field.split(".")
    for depth in range(len(parts), 0, -1):
        for source, layer in reversed(layers):
            value: Any = layer
            for part in parts[:depth]:
                value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
            if value is not _ABSENT:
                return source
    return otherwise


def parse_yaml(text: str) -> object:
    """The data of a YAML 1.2 document. Raises BadInput with what is wrong and where, without the name of a file."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except RecursionError:
        raise BadInput("broken YAML: nested too deeply") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise BadInput(f"broken YAML{where}: {problem}") from None
    except ValueError as error:  # a thirteenth month, say
        raise BadInput(f"broken YAML: {str(error).splitlines()[0]}") from None


def require_mapping(data: object, source: str) -> dict[str, Any]:
    """`data` if it is a mapping. Raises BadInput naming `source`."""
    if isinstance(data, dict):
        return data
    what = "empty" if data is None else f"a {type(data).__name__}"
    raise BadInput(f"{source}: a recipe is a mapping of sections, this is {what}")


def is_grid(data: Mapping[str, Any]) -> bool:
    """Whether a file's data are those of a sweep, not of a recipe."""
    return not _GRID_WORDS.isdisjoint(data)


def printable(text: object) -> str:
    """`text` on one line, whatever is in it."""
    return str(text).encode("unicode_escape").decode() if not str(text).isprintable() else str(text)


def _read_layers(path: Path, seen: list[Path], extended_by: Path | None) -> list[Layer]:
    data = _read_file(path, extended_by)
    base = data.pop("extends", None)
    if base is None:
        return [(printable(path), data)]
    if not isinstance(base, str) or not base:
        raise BadInput(f"{path}: extends: expected a file name, got {shown(base)}")
    if path.resolve() in seen:
        raise BadInput(f"{path}: extends: the chain of recipes comes back to this file")
    return [*_read_layers(path.parent / base, [*seen, path.resolve()], path), (printable(path), data)]


def _read_file(path: Path, extended_by: Path | None) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        who = f"{printable(extended_by)}: extends: " if extended_by else ""
        raise BadInput(f"{who}{printable(path)}: cannot read the recipe: {reason}") from None
    try:
        data = parse_yaml(text)
    except BadInput as error:
        raise BadInput(f"{printable(path)}: {error}") from None
    found = require_mapping(data, printable(path))
    if is_grid(found):
        named = found.get("recipe")
        recipe = f"; its recipe is {printable(os.path.normpath(path.parent / named))}" if isinstance(named, str) else ""
        sweep = printable(shlex.join(["rlkit", "sweep", str(path)]))
        raise BadInput(f"{printable(path)}: a grid, not a recipe; `{sweep}` runs its points{recipe}")
    return found


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
