"""The JSON schema of a tool's parameters, as the model is shown it: small and self-contained.

No titles, definitions put in place (recursive ones stay references), `type` and `description` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

Schema = dict[str, Any]

_MAPS = ("properties", "$defs", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def shown_schema(schema: Schema) -> Schema:
    """From pydantic's schema of the arguments. The top is exactly type, properties, required (and $defs where a type
    contains itself).
    """
    definitions: dict[str, Schema] = schema.get("$defs", {})
    recursive = {name for name in definitions if name in _reachable(definitions[name], definitions)}
    properties = {name: _tidy(part, definitions, recursive) for name, part in schema.get("properties", {}).items()}
    shown: Schema = {"type": "object", "properties": properties}
    if schema.get("required"):
        shown["required"] = schema["required"]
    used = _reachable(shown, {name: _tidy(definitions[name], definitions, recursive) for name in recursive})
    if used:
        shown["$defs"] = {name: _tidy(definitions[name], definitions, recursive) for name in sorted(used)}
    return shown


def _tidy(schema: Any, definitions: Mapping[str, Schema], recursive: set[str]) -> Any:
    """Without titles, and with every reference that can be put in place put there."""
    if not isinstance(schema, dict):
        return schema  # True and False are schemas too
    node = cast(Schema, schema)
    name = _target(node)
    if name is not None and name not in recursive:
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return _tidy({**definitions[name], **siblings}, definitions, recursive)
    # "discriminator" is OpenAPI's, and points to definitions that are gone
    kept = {key: value for key, value in node.items() if key not in ("title", "discriminator")}
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]  # validation says it when it happens
    order = [key for key in ("type", "description") if key in kept]
    ordered = {key: kept[key] for key in (*order, *(key for key in kept if key not in order))}
    return _map_parts(ordered, lambda part: _tidy(part, definitions, recursive))


def _map_parts(schema: Schema, change: Callable[[Any], Any]) -> Schema:
    """`change` on every schema directly inside; values such as `default`, `enum` and `const` are left alone."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _MAPS:
            changed[key] = {name: change(part) for name, part in value.items()}
        elif key in _LISTS:
            changed[key] = [change(part) for part in value]
        elif key in _SINGLE:
            changed[key] = change(value)
    return changed


def _target(schema: Schema) -> str | None:
    reference = schema.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else None


def _reachable(schema: Schema, definitions: Mapping[str, Schema]) -> set[str]:
    """Names of the definitions that `schema` refers to, through others too."""
    found: set[str] = set()
    waiting: list[Any] = [schema]

    def visit(part: Any) -> Any:
        waiting.append(part)
        return part

    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        node = cast(Schema, node)
        name = _target(node)
        if name is not None and name not in found:
            found.add(name)
            waiting.append(definitions.get(name, {}))
        _map_parts(node, visit)
    return found
