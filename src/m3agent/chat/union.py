"""A schema as the list of what it allows: `simple_schemas` resolves references, unions and lists of types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from m3agent.chat.values import Schema, follow

_UNIONS = ("anyOf", "oneOf")
_DEPTH = 16  # references in a row


@dataclass(frozen=True)
class Simple:
    """One member: `values` are the only ones (of enum, const), or else `type` is its one type, None for any.

    alone: there is no other member.
    """

    schema: Schema
    type: str | None
    values: tuple[Any, ...] | None
    alone: bool = False


def simple_schemas(schema: Schema, root: Schema) -> tuple[list[Simple], list[str]]:
    """The members, and the keywords that could not be taken apart."""
    missed: list[str] = []
    found = [simple for part in _members(schema, root, missed, 0) for simple in _typed(part)]
    if len(found) == 1:
        found = [Simple(found[0].schema, found[0].type, found[0].values, alone=True)]
    return found, missed


def _members(schema: Any, root: Schema, missed: list[str], depth: int) -> Iterator[Schema]:
    if schema is False:
        return
    if not isinstance(schema, Mapping):
        yield {}
        return
    if depth > _DEPTH:
        missed.append("$ref")
        yield {}
        return
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", *_UNIONS)}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = follow(reference, root) if reference.startswith("#") else None
        if target is None:
            missed.append("$ref")
            yield rest
            return
        rest = _both(target, rest, missed)
        yield from _members(rest, root, missed, depth + 1)
        return
    parts = schema.get("allOf")
    if isinstance(parts, list):
        for part in parts:
            if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                part = follow(part["$ref"], root) or {}
            rest = _both(part, rest, missed)
        rest |= {key: schema[key] for key in _UNIONS if key in schema}
        yield from _members(rest, root, missed, depth + 1)
        return
    for keyword in _UNIONS:
        choices = schema.get(keyword)
        if isinstance(choices, list):
            others = {key: schema[key] for key in _UNIONS if key in schema and key != keyword}
            for choice in choices:
                resolved: Any = choice
                if isinstance(choice, Mapping) and isinstance(choice.get("$ref"), str):
                    resolved = _both(follow(choice["$ref"], root) or {}, _without(choice, "$ref"), missed)
                if resolved is not False:
                    yield from _members(_both(resolved, {**rest, **others}, missed), root, missed, depth + 1)
            return
    yield rest


def _both(one: Any, two: Schema, missed: list[str]) -> dict[str, Any]:
    """Both at once, where they do not speak of the same; a keyword of both that differs is not enforced twice."""
    if not isinstance(one, Mapping):
        return dict(two)
    both = {**one, **two}
    for key in one.keys() & two.keys():
        if one[key] == two[key] or key in ("title", "description", "default", "examples", "$defs"):
            continue
        if key == "properties":
            both[key] = {**one[key], **two[key]}
        elif key == "required":
            both[key] = [*one[key], *(name for name in two[key] if name not in one[key])]
        elif key == "type":
            both[key] = _common(one[key], two[key])
        else:
            missed.append(key)
    return both


def _common(one: Any, two: Any) -> Any:
    first, second = ([kind] if isinstance(kind, str) else list(kind) for kind in (one, two))
    if "number" in second:
        second.append("integer")
    if "number" in first:
        first.append("integer")
    return [kind for kind in first if kind in second]


def _typed(schema: Schema) -> Iterator[Simple]:
    kinds = schema.get("type")
    types = [kinds] if isinstance(kinds, str) else list(kinds) if isinstance(kinds, list) else None
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        yield Simple(schema, None, tuple(value for value in values if types is None or _is_of(value, types)))
    elif types is not None:
        for kind in types:
            yield Simple(_without(schema, "type"), kind, None)
    elif "properties" in schema:
        yield Simple(schema, "object", None)
    elif "items" in schema or "prefixItems" in schema:
        yield Simple(schema, "array", None)
    else:
        yield Simple(schema, None, None)


def _is_of(value: Any, types: list[str]) -> bool:
    names = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, Mapping),
    }
    return any(names.get(kind, False) for kind in types)


def _without(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}
