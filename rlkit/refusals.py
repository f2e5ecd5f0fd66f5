"""pydantic's refusals in plain words: the field, what is allowed there, and what was given.

What is allowed is read from the model's own JSON schema, so a bound is written once, where the field is declared. A
field that a pattern describes says in its `description` what the pattern means.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

# Of a value: enough to recognise it.
SHOWN_CHARACTERS = 60
# Fields of a section; more are no help in one line.
LISTED_FIELDS = 6

Schema = Mapping[str, Any]

_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "array": "a list",
    "object": "a mapping",
}
# What pydantic's error types begin with, where there is no schema to ask.
_ERROR_KINDS = {"int": "integer", "float": "number", "bool": "boolean", "string": "string", "list": "array"}
# The types that pydantic gives to a number out of bounds, and where the error has the bound.
_BOUNDS = {
    ("greater_than_equal", "ge"): "a number of {} or more",
    ("greater_than", "gt"): "a number above {}",
    ("less_than_equal", "le"): "a number of at most {}",
    ("less_than", "lt"): "a number below {}",
}


def refusals(error: ValidationError, model: type[BaseModel] | None = None) -> list[tuple[str, str]]:
    """What is wrong, as (dotted field, what about it), each field once; the field is empty for the whole.

    `model` is what was validated; without it only the kind of value that is allowed can be told.
    """
    schema = model.model_json_schema() if model is not None else {}
    told: dict[str, str] = {}
    for item in error.errors():
        path, node = _walk(schema, item["loc"])
        if item["type"] in ("extra_forbidden", "missing"):
            path = item["loc"]
        elif item["loc"][-1:] == ("[key]",):
            path = path[:-1]
        told.setdefault(".".join(map(str, path)), _about(item, node, schema))
    return list(told.items())


def shown(value: object) -> str:
    """A value as its writer knows it, on one line and not too long: YAML's words for true, false and null."""
    plain = {True: "true", False: "false", None: "null"}
    text = plain[value] if value is None or isinstance(value, bool) else repr(value)
    text = text if text.isprintable() else text.encode("unicode_escape").decode()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _about(item: Any, node: Schema, schema: Schema) -> str:
    kind = item["type"]
    if kind == "missing":
        return "missing"
    if kind == "extra_forbidden":
        return f"unknown field{_meant(item['loc'], schema)}"
    if kind == "value_error":  # a validator of ours, which speaks for itself
        return str(item["ctx"]["error"])
    if kind == "json_invalid":
        return f"broken JSON: {item['ctx']['error']}"
    if kind == "invalid_key" or item["loc"][-1:] == ("[key]",):
        return f"expected text as a name, got {shown(item['input'])}"
    if kind == "finite_number":
        return f"expected a finite number, got {shown(item['input'])}"
    allowed = _allowed(node, schema) or _kind_of_error(item)
    return f"expected {allowed}, got {shown(item['input'])}"


def _meant(location: tuple[int | str, ...], schema: Schema) -> str:
    """The field that was probably meant: of a similar name beside it, or of the same name in another section."""
    name = str(location[-1])
    _, parent = _walk(schema, location[:-1])
    fields = list(_variant(parent, schema).get("properties", {}))
    elsewhere = [
        f"{section}.{name}"
        for section, node in schema.get("properties", {}).items()
        if name in _variant(node, schema).get("properties", {})
    ]
    meant = difflib.get_close_matches(name, fields, n=1, cutoff=0.75) or elsewhere[:1]
    if meant:
        return f", did you mean {meant[0]}?"
    return f", there are {_some(fields)}" if fields else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED_FIELDS]) + (", ..." if len(names) > LISTED_FIELDS else "")


def _kind_of_error(item: Any) -> str:
    expected = item.get("ctx", {}).get("expected")
    if expected is not None:
        return str(expected).replace("'", "")
    for bound, words in _BOUNDS.items():
        if item["type"] == bound[0]:
            return words.format(item["ctx"][bound[1]])
    kind = _ERROR_KINDS.get(item["type"].split("_")[0])
    return _KINDS[kind] if kind else f"something else ({item['msg'][0].lower()}{item['msg'][1:]})"


def _walk(schema: Schema, location: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], Schema]:
    """The part of an error's location that names fields and items, and the schema there.

    pydantic also puts the members of a union and the keys of a mapping into a location; those end it.
    """
    node = schema
    for depth, part in enumerate(location):
        variant = _variant(node, schema)
        if part in variant.get("properties", {}):
            node = variant["properties"][part]
        elif isinstance(part, int) and "items" in variant:
            node = variant["items"]
        elif isinstance(variant.get("additionalProperties"), Mapping) and part != "[key]":
            node = variant["additionalProperties"]
        else:
            return location[:depth] if schema else location, node
    return location, node


def _variant(node: Schema, schema: Schema) -> Schema:
    """The schema with fields or items that `node` stands for, following references and passing over null."""
    if "$ref" in node:
        return _variant(schema["$defs"][str(node["$ref"]).rpartition("/")[2]], schema)
    members = [_variant(member, schema) for member in node.get("anyOf", [])]
    members = [member for member in members if member.get("type") != "null"]
    return members[0] if len(members) == 1 else node


def _allowed(node: Schema, schema: Schema) -> str:
    """What a schema allows, in words; empty when it says nothing."""
    if "description" in node and "$ref" not in node and "properties" not in node:
        return str(node["description"])
    if "anyOf" in node:
        return _listed([_allowed(member, schema) for member in node["anyOf"]])
    if "enum" in node or "const" in node:
        return _listed([str(value) for value in node.get("enum", [node.get("const")])])
    node = _variant(node, schema)
    if "properties" in node:
        return f"a section ({_some(list(node['properties']))})"
    kind = str(node.get("type", ""))
    words = _KINDS.get(kind, "")
    if kind == "array" and node.get("items"):
        many = f" of at least {node['minItems']}" if "minItems" in node else ""
        return f"a list{many}, each item {_allowed(node['items'], schema)}"
    if kind == "object" and isinstance(node.get("additionalProperties"), Mapping):
        return f"a mapping, each value {_allowed(node['additionalProperties'], schema)}"
    if kind == "string" and node.get("minLength"):
        return "text that is not empty"
    return " ".join(filter(None, [words, _bounds(node)]))


def _bounds(node: Schema) -> str:
    names = {"exclusiveMinimum": "above", "minimum": "of at least", "exclusiveMaximum": "below", "maximum": "at most"}
    return " and ".join(f"{word} {_plain(node[name])}" for name, word in names.items() if name in node)


def _plain(bound: float) -> str:
    """A bound in digits that could be typed where it is told; `:g` alone makes 1e+06 of a million."""
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


def _listed(words: list[str]) -> str:
    words = list(dict.fromkeys(filter(None, words)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else ""
