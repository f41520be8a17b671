"""A value as JSON text in the grammar: llguidance's own rule for schemas, with numbers that every reader can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from m3agent.chat.values import Schema, follow

LARGEST = 10**15  # of numbers without bounds: no exponents, no infinity
_ANY = "m3agent-any"
_LEFT_OUT = {"title", "description", "default", "examples", "discriminator", "$schema", "$id", "$anchor"}
_LEFT_OUT |= {"$dynamicAnchor", "$defs", "definitions"}  # what is referred to comes anew
# At most one space, after a colon or comma: laying an answer out costs tokens, and small models never stop.
_SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?"}


def json_rule(schema: Any, root: Schema, *, spaces: bool = False) -> str:
    """`%json {…}`. root: where local references point into. spaces: let a space stand after a colon or comma."""
    names: dict[str, str] = {}
    bounded = _bounded(schema, names) if isinstance(schema, Mapping) else {"$ref": f"#/$defs/{_ANY}"}
    definitions: dict[str, Any] = {_ANY: _any_value()}
    while missing := [reference for reference, name in names.items() if name not in definitions]:
        for reference in missing:  # they may refer to others
            definitions[names[reference]] = _bounded(follow(reference, root), names)
    layout = _SEPARATORS if spaces else {}
    options = {**layout, "whitespace_flexible": False, "lenient": True, "json_allowed_escapes": 'nrbtf\\"'}
    return "%json " + json.dumps({"x-guidance": options, **bounded, "$defs": definitions})


def _any_value() -> dict[str, Any]:
    inside = {"$ref": f"#/$defs/{_ANY}"}
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "array", "items": inside},
            {"type": "object", "additionalProperties": inside},
        ]
    }


def _bounded(schema: Any, names: dict[str, str]) -> Any:
    """The schema with bounds on numbers, and with "anything" spelled out, at every place.

    names: of the definitions that stand for local references; new ones are added. A rule holds a part of a whole
    schema, in which `#/properties/a/items/0` would lead nowhere.
    """
    if not isinstance(schema, Mapping) or schema == {}:
        return False if schema is False else {"$ref": f"#/$defs/{_ANY}"}
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "dependentSchemas"):
            out[key] = {name: _bounded(part, names) for name, part in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            out[key] = [_bounded(part, names) for part in value]
        elif key in ("items", "additionalProperties") and value is not False:
            out[key] = _bounded(value, names)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            out[key] = f"#/$defs/{names.setdefault(value, f'd{len(names)}')}"
        elif key not in _LEFT_OUT:
            out[key] = value
    kinds = out.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if "number" in kinds or "integer" in kinds:
        if "minimum" not in out and "exclusiveMinimum" not in out:
            out["minimum"] = min(-LARGEST, out.get("maximum", 0), out.get("exclusiveMaximum", 1) - 1)
        if "maximum" not in out and "exclusiveMaximum" not in out:
            out["maximum"] = max(LARGEST, out.get("minimum", 0), out.get("exclusiveMinimum", -1) + 1)
    if "object" in kinds and "additionalProperties" not in out:
        # Named properties are enough; without any, everything is.
        out["additionalProperties"] = False if out.get("properties") else {"$ref": f"#/$defs/{_ANY}"}
    if "array" in kinds and "items" not in out:
        out["items"] = False if out.get("prefixItems") else {"$ref": f"#/$defs/{_ANY}"}
    return out
