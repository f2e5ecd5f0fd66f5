"""The parameters of a notebook: what its cell declares, and values checked against it.

The file is read as the JSON that it is: nbformat takes a second to import, and a sweep asks this before anything else.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from rlkit.errors import BadInput

# These name files: given relative to where the caller is, while the notebook runs in its own folder.
PATH_PARAMETERS = frozenset({"folder", "grid", "page", "recipe"})
# Lists of names that are files if there are such.
PATH_LISTS = frozenset({"runs", "recipes"})

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "list": (list,),
    "dict": (dict,),
    "None": (type(None),),
}


def declared_parameters(notebook: Path) -> dict[str, str]:
    """Name and type (empty when it has none) of each parameter in the cell tagged `parameters`. Raises BadInput."""
    # Not papermill's own inspection: it misses a parameter whose comment holds an equals sign.
    source = _source(notebook)
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise BadInput(f"{notebook}: cell of parameters: {error.msg} (line {error.lineno})") from None
    found = {}
    for statement in statements:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign):
            found.update({target.id: "" for target in statement.targets if isinstance(target, ast.Name)})
    return found


def checked_parameters(notebook: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """The values as papermill passes them on with their types. Raises BadInput for a name or type that does not fit."""
    declared = declared_parameters(notebook)
    values = {}
    for name, given in parameters.items():
        if name not in declared:
            raise BadInput(f"{notebook}: no parameter {name}; it has {', '.join(declared) or 'none'}")
        # Papermill writes values as literals and turns what it does not know, numpy's scalars too, into strings.
        value = given.item() if hasattr(given, "item") else str(given) if isinstance(given, Path) else given
        value = list(value) if isinstance(value, tuple) else value
        kinds = [re.sub(r"\[.*", "", part).strip() for part in declared[name].split("|")]
        if all(kind in _TYPES for kind in kinds) and not any(_fits(value, kind) for kind in kinds):
            raise BadInput(f"{notebook}: parameter {name}: expected {declared[name]}, got {value!r}")
        if name in PATH_LISTS and isinstance(value, list):
            value = [str(Path(one).resolve()) if Path(one).exists() else one for one in map(str, value)]
        values[name] = str(Path(str(value)).resolve()) if name in PATH_PARAMETERS and value else value
    return values


def _fits(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def _source(notebook: Path) -> str:
    """The text of the cell tagged `parameters`, empty without one. Raises BadInput for what is no notebook."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        tagged = (cell["source"] for cell in cells if "parameters" in cell["metadata"].get("tags", []))
        return "".join(next(tagged, ""))  # lines, or all in one
    except OSError as error:
        raise BadInput(f"{notebook}: cannot read the notebook: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{notebook}: not a Jupyter notebook") from None
