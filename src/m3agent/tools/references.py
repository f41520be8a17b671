"""The schemas inside a hand-written schema, and where their references lead.

Every reference has to lead to a schema inside the whole, and none, directly or through `anyOf` and its like, back to
itself for the same value: checking would never end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast

from referencing import Registry, Specification
from referencing.exceptions import Unresolvable

from m3agent.errors import ToolDefinitionError

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that hold schemas by name, and those that hold one, or a list of them. No other one holds schemas: a
# "$ref" inside `default` or `const` is a value, inside a property that is named "default" it is a reference.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_SAME = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains")
_OTHER = ("additionalProperties", "unevaluatedProperties", "propertyNames", "contentSchema")
_SAME_VALUE = {*_SAME, "dependentSchemas", "dependencies"}  # their schemas are for the value that the schema is for


@dataclass
class Part:
    """A schema inside the whole. `same`: the ids of those that hold for the same value as it does."""

    path: str
    schema: Mapping[str, Any]
    same: list[int] = field(default_factory=list[int])


def schema_parts(tool: str, schema: Mapping[str, Any], specification: Specification[Any]) -> list[Part]:
    """All schemas inside, the whole one first. Nothing is ever fetched.

    Raises ToolDefinitionError for a reference that leads outside, to what is no schema, or back to itself.
    """
    registry: Registry[Any] = Registry()
    found: dict[int, Part] = {}
    top = registry.resolver_with_root(specification.create_resource(schema))
    waiting: deque[tuple[str, Any, Any]] = deque([("", schema, top)])
    while waiting:
        path, node, resolver = waiting.popleft()
        if not isinstance(node, Mapping) or id(cast(Any, node)) in found:
            continue
        node = cast("Mapping[str, Any]", node)
        part = found[id(node)] = Part(path, node)
        for keyword, step, inner in _inner(node):
            if isinstance(inner, Mapping):
                within = resolver.in_subresource(specification.create_resource(inner))
                waiting.append((f"{path}{step}".removeprefix("."), cast(Any, inner), within))
            if keyword in _SAME_VALUE:
                part.same.append(id(cast(Any, inner)))
        for target in (node[keyword] for keyword in _REFERENCES if isinstance(node.get(keyword), str)):
            inner, within = _followed(tool, target, resolver)
            waiting.append((path, inner, within))
            part.same.append(id(inner))
    _check_ends(tool, found)
    return list(found.values())


def _followed(tool: str, target: str, resolver: Any) -> tuple[Any, Any]:
    """(schema, resolver of the references in it)."""
    try:
        found: Any = resolver.lookup(target)
    except (Unresolvable, LookupError, TypeError, ValueError):  # all but the first of pointers into values
        raise ToolDefinitionError(
            f"tool {tool!r}: its schema refers to {target!r}, which is not in it; put it into $defs"
        ) from None
    contents: Any = found.contents
    if not isinstance(contents, Mapping | bool):
        raise ToolDefinitionError(f"tool {tool!r}: its schema refers to {target!r}, which is no schema")
    return cast(Any, contents), found.resolver


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(keyword, step of the path, schema) of those directly inside."""
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, Mapping):
            for name, inner in cast("Mapping[str, Any]", value).items():
                yield keyword, f".{name}" if keyword == "properties" else f".{keyword}.{name}", inner
        elif keyword in _SAME or keyword in _ITEMS or keyword in _OTHER:
            step = "[]" if keyword in _ITEMS else f".{keyword}" if keyword in _OTHER else ""
            for inner in cast("list[Any]", value) if isinstance(value, list) else [value]:
                yield keyword, step, inner


def _check_ends(tool: str, found: Mapping[int, Part]) -> None:
    try:
        TopologicalSorter({key: part.same for key, part in found.items()}).prepare()
    except CycleError as error:
        place = found[error.args[1][0]].path or "the top"
        raise ToolDefinitionError(
            f"tool {tool!r}: at {place}, its schema leads back to itself for the same value; checking it would never "
            "end. A schema may refer to itself from inside its properties or items"
        ) from None
