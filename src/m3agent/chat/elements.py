"""Arguments of a tool call as namespaced elements, in both directions: `write_calls` and `read_arguments`.

Format (chat format of MiniMax-M3): NS<key>value NS</key>; objects nest their entries, lists nest one NS<item> per
element, nothing is escaped. Only a tag with the namespace token before it is structure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m3agent.chat import markers
from m3agent.chat.messages import ChatCall
from m3agent.chat.segments import SegmentWriter
from m3agent.chat.values import Schema, allowed_types, alternatives, leaf
from m3agent.errors import ConversationError, ToolDefinitionError

MAX_DEPTH = 128  # elements inside each other
MAX_TAG = 1024  # characters of a tag's inside
INVOKE_TAG = re.compile(r"invoke(\s|$)")  # opens a call wherever it stands in one


@dataclass
class Element:
    """One element as read: the pieces of its own text, and its children in order."""

    name: str
    path: tuple[str, ...]
    texts: list[str] = field(default_factory=list[str])
    children: list[Element] = field(default_factory=list["Element"])


def write_calls(calls: Sequence[ChatCall], out: SegmentWriter) -> None:
    """The block of a turn's tool calls; names and values are text from outside."""
    if not calls:
        return
    _open(markers.TOOL_CALL, out)
    out.text("\n")
    for call in calls:
        if not isinstance(call.arguments, Mapping):
            raise ConversationError(f"the arguments of call {call.name!r} are not an object of names and values")
        _open(f'<invoke name="{call.name}">', out)
        _write_entries(call.arguments, out, 1)
        _open("</invoke>", out)
        out.text("\n")
    _open(markers.TOOL_CALL_END, out)


def read_arguments(elements: Iterable[Element], schema: Schema) -> dict[str, Any]:
    """Typed arguments from the elements of a call. `schema` is the tool's `parameters`, {} for an unknown tool."""
    return _object(elements, "", schema, schema)


def check_tool_names(tool: Mapping[str, Any]) -> None:
    """Raises ToolDefinitionError if the tool's name, or a name in its parameter schema, cannot be written.

    `tool` is the function object {"name", "description"?, "parameters"?}. Nothing is escaped in the format, so a
    name with ">" cannot be read back, and `invoke` or `tool_call` would end the call.
    """
    name = tool.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_TAG // 2 or re.search(r"[\"'<>\s]", name):
        raise ToolDefinitionError(
            f"tool name {name!r} cannot be written: use letters, digits, '_' and '-', at most {MAX_TAG // 2} of them"
        )
    for key in sorted(set(_property_names(tool.get("parameters")))):
        problem = _name_problem(key)
        if problem:
            raise ToolDefinitionError(f"tool {name!r}: parameter name {key!r} {problem}; rename the parameter")


def _name_problem(key: str) -> str | None:
    if not key.strip():
        return "is blank"
    if ">" in key:
        return "contains '>'"
    if key.startswith("/"):
        return "starts with '/'"
    if key == "tool_call" or INVOKE_TAG.match(key):
        return "is part of the call format"
    return "is too long" if len(key) >= MAX_TAG else None


def _property_names(schema: Any) -> Iterable[str]:
    """Every key of every `properties`, also in nested schemas and definitions."""
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            yield from properties
        for key, inner in schema.items():
            # The values of `properties` and `$defs` are schemas by name; a name is not a keyword there.
            named = key in ("properties", "$defs", "definitions", "patternProperties")
            for child in inner.values() if named and isinstance(inner, Mapping) else (inner,):
                yield from _property_names(child)
    elif isinstance(schema, list):
        for child in schema:
            yield from _property_names(child)


def _open(tag: str, out: SegmentWriter) -> None:
    out.control(markers.NS)
    if tag in (markers.TOOL_CALL, markers.TOOL_CALL_END):
        out.control(tag)
    else:
        out.text(tag)


def _write_entries(entries: Mapping[str, Any], out: SegmentWriter, depth: int) -> None:
    for key, value in entries.items():
        if value is not None:  # absent and null are the same in this format
            out.control(markers.NS)
            out.text(f"<{key}>")
            _write_value(value, out, depth)
            out.control(markers.NS)
            out.text(f"</{key}>")


def _write_value(value: Any, out: SegmentWriter, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ConversationError(f"arguments are nested deeper than {MAX_DEPTH} levels, which cannot be read back")
    if value is None:
        return
    if isinstance(value, bool):
        out.text("true" if value else "false")
    elif isinstance(value, str | int | float):
        out.text(str(value))
    elif isinstance(value, Mapping):
        _write_entries(value, out, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            out.control(markers.NS)
            out.text("<item>")
            _write_value(item, out, depth + 1)
            out.control(markers.NS)
            out.text("</item>")
    else:
        raise ConversationError(f"an argument is no JSON value: {type(value).__name__}")


def _value(element: Element, schema: Schema, root: Schema) -> Any:
    text = "".join(element.texts)
    if not element.children:
        return leaf(text, schema, root)
    stray = text if text.strip() else ""
    container = _container_type(element, schema, root)
    if container == "array" and not stray:
        schemas = _item_schemas(schema, root, len(element.children))
        return [_value(child, part, root) for child, part in zip(element.children, schemas, strict=True)]
    return _object(element.children, stray, schema, root)


def first_container(schema: Schema, root: Schema) -> str | None:
    """ "array" or "object", whichever the schema names first; None if neither."""
    for alternative in alternatives(schema, root):
        named = alternative.get("type")
        for name in named if isinstance(named, list) else [named]:
            if name in ("array", "object"):
                return name
        if "items" in alternative or "properties" in alternative:
            return "array" if "items" in alternative else "object"
    return None


def _item_schemas(schema: Schema, root: Schema, count: int) -> list[Schema]:
    """What types each of `count` items: `prefixItems` by place (a tuple), `items` beyond."""
    choices = list(alternatives(schema, root))
    first = next((choice["prefixItems"] for choice in choices if isinstance(choice.get("prefixItems"), list)), [])
    rest = next((choice["items"] for choice in choices if isinstance(choice.get("items"), Mapping)), {})
    places: list[Schema] = [part if isinstance(part, Mapping) else {} for part in first[:count]]
    return places + [rest] * (count - len(places))


def _container_type(element: Element, schema: Schema, root: Schema) -> str:
    """Children alone do not tell a list from an object with one key `item`: the schema's first container does."""
    named = first_container(schema, root)
    if named is not None:
        return named
    only_items = all(child.name == "item" for child in element.children)
    return "array" if only_items and not allowed_types(schema, root) else "object"


def _object(elements: Iterable[Element], stray: str, schema: Schema, root: Schema) -> dict[str, Any]:
    """Entries in document order. A name that comes again makes a list at the place of the first."""
    values: dict[str, list[Any]] = {}
    for element in elements:
        values.setdefault(element.name, []).append(_value(element, entry_schema(element.name, schema, root), root))
    entries = {name: found[0] if len(found) == 1 else found for name, found in values.items()}
    if stray:
        key = "$text"
        while key in entries:
            key = f"${key}"
        entries[key] = stray
    return entries


def entry_schema(name: str, schema: Schema, root: Schema) -> Schema:
    """The schema that types the entry `name` of an object; {} where none does."""
    choices = list(alternatives(schema, root))
    for choice in choices:
        properties = choice.get("properties")
        if isinstance(properties, Mapping) and isinstance(properties.get(name), Mapping):
            return properties[name]
    return next((c["additionalProperties"] for c in choices if isinstance(c.get("additionalProperties"), Mapping)), {})
