"""Typed values from the text of one element: what a tool's JSON schema allows decides how the text is read.

The order is null, integer, number, boolean, object or array (JSON text), string; the first that fits wins. Whether
the value is valid (enum membership, ranges, required names) is for the validation that follows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_MAX_REFERENCES = 16  # a schema may refer to itself
_NONE = object()  # "does not fit"; None is a value


def leaf(text: str, schema: Schema, root: Schema) -> Any:
    """The value of an element without children. `root` is the schema that local references point into."""
    types = allowed_types(schema, root)
    if not types:
        return text
    containers = types & {"array", "object"}
    if containers and "string" not in types and not text.strip():
        return [] if "array" in types else {}
    for read in (_null, _integer, _number, _boolean, _container):
        value = read(text, types)
        if value is not _NONE:
            return value
    if "string" in types:
        return text
    value = _json(text)
    return text if value is _NONE else value


def allowed_types(schema: Schema, root: Schema) -> set[str]:
    """JSON types that a schema names: by `type`, by its enum values, by its alternatives. Empty if it names none."""
    types: set[str] = set()
    for alternative in alternatives(schema, root):
        named = alternative.get("type")
        if isinstance(named, str):
            types.add(named)
        elif isinstance(named, list):
            types.update(name for name in named if isinstance(name, str))
        constants = alternative.get("enum")
        types.update(_type_of(value) for value in (constants if isinstance(constants, list) else ()))
        if "const" in alternative:
            types.add(_type_of(alternative["const"]))
    return types


def alternatives(schema: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """The schema itself, then those of its anyOf, oneOf and allOf, with local references followed."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return
    yield schema
    reference = schema.get("$ref", schema.get("$dynamicRef"))
    if isinstance(reference, str) and reference.startswith("#"):
        yield from alternatives(follow(reference, root), root, depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(keyword)
        for choice in choices if isinstance(choices, list) else ():
            yield from alternatives(choice, root, depth + 1)


def follow(reference: str, root: Schema) -> Any:
    """What a local reference points to: `#`, `#/a/pointer`, `#anchor`. None where there is nothing."""
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        return _anchored(fragment, root)
    target: Any = root
    for step in fragment.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, Mapping):
            target = target.get(step)
        else:
            return None
    return target


def _anchored(name: str, node: Any) -> Any:
    """The first schema inside with this `$anchor`; its name is that of nothing else by the rules of JSON Schema."""
    if isinstance(node, Mapping):
        if name in (node.get("$anchor"), node.get("$dynamicAnchor")):
            return node
        node = list(node.values())
    found = (_anchored(name, inner) for inner in node) if isinstance(node, list) else ()
    return next((schema for schema in found if schema is not None), None)


def _null(text: str, types: set[str]) -> Any:
    return None if "null" in types and text.lower() == "null" else _NONE


def _integer(text: str, types: set[str]) -> Any:
    text = text.strip()
    if "integer" not in types or not _INTEGER.fullmatch(text):
        return _NONE
    try:
        return int(text)
    except ValueError:  # over Python's limit of digits
        return _NONE


def _number(text: str, types: set[str]) -> Any:
    text = text.strip()
    if "number" not in types or not _NUMBER.fullmatch(text):
        return _NONE
    exact = _integer(text, {"integer"})
    if exact is not _NONE:
        return exact
    value = float(text)
    if not math.isfinite(value):
        return _NONE
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _boolean(text: str, types: set[str]) -> Any:
    return _BOOLEANS.get(text.strip().lower(), _NONE) if "boolean" in types else _NONE


def _container(text: str, types: set[str]) -> Any:
    value = _json(text) if types & {"array", "object"} else _NONE
    return value if _type_of(value) in types & {"array", "object"} else _NONE


def _json(text: str) -> Any:
    """Strict JSON with finite numbers, or _NONE. Nothing is repaired."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text: a ValueError here
        return value
    except (ValueError, RecursionError):
        return _NONE


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = ((int, "integer"), (float, "number"), (str, "string"), (list, "array"), (Mapping, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "")
