"""The grammar of what a model may write: a block of tool calls in M3's elements, and an answer in JSON.

In the Lark dialect of llguidance. Control tokens stand in it by their ids, so no text can spell one. What the grammar
lets through, `values` and `elements` read back as a value that its schema accepts; where the elements cannot say
something (maps with free names, unions whose members are read differently), the value is written as JSON text, which
the format knows too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m3agent.chat import markers
from m3agent.chat.elements import entry_schema, first_container
from m3agent.chat.json_text import json_rule
from m3agent.chat.patterns import any_text, format_pattern, integer_pattern, length_pattern, search_pattern
from m3agent.chat.tokenizer import Tokenizer
from m3agent.chat.union import Simple, simple_schemas
from m3agent.chat.values import Schema, allowed_types, leaf

# What a union's other members read as something else, and a string may therefore not spell.
_READ_OTHERWISE = {
    "null": r"[nN][uU][lL][lL]",
    "boolean": r"[\s\x1c-\x1f]*([tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|0|1)[\s\x1c-\x1f]*",
    "integer": r"[\s\x1c-\x1f]*-?[0-9]+[\s\x1c-\x1f]*",
    "number": r"[\s\x1c-\x1f]*-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?[\s\x1c-\x1f]*",
    "array": r"[ \t\n\r]*[\[{](?s:.*)",
    "object": r"[ \t\n\r]*[\[{](?s:.*)",
}
# Keywords that say nothing about which values are valid.
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
_ANNOTATIONS |= {"$defs", "definitions", "$comment", "discriminator", "contentEncoding", "contentMediaType", "$anchor"}
_ANNOTATIONS |= {"$dynamicAnchor"}
_HANDLED = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


@dataclass(frozen=True)
class Grammar:
    """`lark`: the text. `unenforced`: keywords that it does not hold to, as `path: keyword`; validation still does."""

    lark: str
    unenforced: tuple[str, ...]


def calls_grammar(tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Grammar:
    """One block of calls. tools: function objects {"name", "description"?, "parameters"?}."""
    rules = _Rules(tokenizer)
    rules.lines.append(f"start: {rules.block(tools)}")
    return rules.grammar()


def answer_grammar(schema: Schema, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Grammar:
    """JSON text that `schema` accepts, or, where there are tools, a block of calls."""
    rules = _Rules(tokenizer)
    answer = json_rule(schema, schema, spaces=True)
    start = f"answer | {rules.block(tools)}" if tools else "answer"
    rules.lines += [f"start: {start}", f"answer: {answer}"]
    return rules.grammar()


def unenforced(parameters: Schema, tokenizer: Tokenizer | None = None) -> tuple[str, ...]:
    """The keywords of a tool's parameters that guided decoding does not hold to."""
    rules = _Rules(tokenizer)
    rules.root = parameters
    rules.entries(parameters, "")
    return rules.grammar().unenforced


@dataclass
class _Rules:
    """Collects rules and terminals; every method returns an expression that may stand in a rule."""

    tokenizer: Tokenizer | None
    root: Schema = field(default_factory=dict[str, Any])
    lines: list[str] = field(default_factory=list[str])
    missed: list[str] = field(default_factory=list[str])
    names: dict[str, str] = field(default_factory=dict[str, str])  # terminals by body; references by target

    def grammar(self) -> Grammar:
        return Grammar("\n".join(self.lines) + "\n", tuple(dict.fromkeys(self.missed)))

    def control(self, marker: str) -> str:
        return f"<[{0 if self.tokenizer is None else self.tokenizer.control_id(marker)}]>"

    def block(self, tools: Sequence[Mapping[str, Any]]) -> str:
        ns, calls = self.control(markers.NS), []
        for tool in tools:
            self.root = tool.get("parameters") or {}
            self.names = {name: rule for name, rule in self.names.items() if not name.startswith("#")}
            inside = self.entries(self.root, "")
            name, end = json.dumps(f'<invoke name="{tool["name"]}">'), json.dumps("</invoke>")
            calls.append(self.rule(f"{ns} {name} {inside} {ns} {end} {json.dumps(chr(10))}"))
        begin, end = self.control(markers.TOOL_CALL), self.control(markers.TOOL_CALL_END)
        return self.rule(f"{ns} {begin} {json.dumps(chr(10))} ({' | '.join(calls)})+ {ns} {end}")

    def rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        if body not in self.names:
            self.names[body] = f"T{len(self.lines)}"
            self.lines.append(f"{self.names[body]}: {body}")
        return self.names[body]

    def element(self, name: str, schema: Any, path: str) -> str:
        ns = self.control(markers.NS)
        content = self.content(schema, path)
        return self.rule(f"{ns} {json.dumps(f'<{name}>')} {content} {ns} {json.dumps(f'</{name}>')}")

    def content(self, schema: Any, path: str) -> str:
        """What may stand between an element's tags."""
        if not isinstance(schema, Mapping):
            return self.terminal(any_text())
        reference = schema.get("$ref")
        if isinstance(reference, str):
            key = json.dumps(dict(schema), sort_keys=True)
            if f"#{key}" not in self.names:
                name = self.names[f"#{key}"] = f"ref{len(self.names)}"
                self.lines.append("")  # its place; the body may refer to it
                place = len(self.lines) - 1
                self.lines[place] = f"{name}: {self._any_of(schema, path)}"
            return self.names[f"#{key}"]
        return self._any_of(schema, path)

    def _any_of(self, schema: Schema, path: str) -> str:
        choices, missed = simple_schemas(schema, self.root)
        self.missed += [f"{path or 'arguments'}: {keyword}" for keyword in missed]
        written = [text for choice in choices for text in self._simple(choice, schema, path)]
        if not written:  # nothing of it can be written: let the validation say so
            self.missed.append(f"{path or 'arguments'}: {', '.join(sorted(schema))}")
            return self.terminal(any_text())
        return written[0] if len(written) == 1 else f"({' | '.join(dict.fromkeys(written))})"

    def _simple(self, choice: Simple, whole: Schema, path: str) -> list[str]:
        """One member of a union, in every way that is read back as a value of it."""
        schema = choice.schema
        if choice.values is not None:
            return [self._literal(value, whole) for value in choice.values if self._reads(value, whole)]
        self._note(choice, path)
        match choice.type:
            case None:
                return [self.terminal(any_text())]
            case "null":
                return [json.dumps("null")] if self._reads(None, whole) else []
            case "boolean":
                return [self._literal(value, whole) for value in (True, False) if self._reads(value, whole)]
            case "integer" | "number":
                return [self._number(schema, choice.type)]
            case "string":
                return self._string(schema, whole, path, alone=choice.alone)
            case "array":
                return [self._array({"type": "array", **schema}, whole, path)]
            case _:
                return [self._object({"type": "object", **schema}, whole, path)]

    def _note(self, choice: Simple, path: str) -> None:
        known = _HANDLED.get(choice.type or "", set()) | _ANNOTATIONS | {"type", "enum", "const"}
        # A keyword for another type says nothing here.
        others = set().union(*_HANDLED.values()) if choice.type is not None else set()
        for keyword in choice.schema:
            if keyword not in known and keyword not in others:
                self.missed.append(f"{path or 'arguments'}: {keyword}")

    def _reads(self, value: Any, whole: Schema) -> bool:
        found = leaf(_spelled(value), whole, self.root)
        return type(found) is type(value) and found == value

    def _literal(self, value: Any, whole: Schema) -> str:
        return json.dumps(_spelled(value), ensure_ascii=False)

    def _number(self, schema: Schema, kind: str) -> str:
        bounds = {name: schema[name] for name in _HANDLED["number"] if name in schema}
        if kind == "integer" and not bounds:
            return self.terminal(integer_pattern())
        return json_rule({"type": kind, **bounds}, self.root)

    def _string(self, schema: Schema, whole: Schema, path: str, *, alone: bool) -> list[str]:
        parts: list[str] = []
        for keyword, pattern in (
            ("pattern", search_pattern(schema["pattern"]) if isinstance(schema.get("pattern"), str) else ""),
            ("format", format_pattern(schema["format"]) if isinstance(schema.get("format"), str) else ""),
        ):
            if pattern is None and not alone:
                return []  # the other members of the union say it as well
            if pattern is None:
                self.missed.append(f"{path or 'arguments'}: {keyword}")
            elif pattern:
                parts.append(pattern)
        length = length_pattern(schema.get("minLength"), schema.get("maxLength"))
        parts += [length] if length or not parts else []
        parts = [part or any_text() for part in parts]
        others = allowed_types(whole, self.root) - {"string"}
        banned = dict.fromkeys(f"~/{_READ_OTHERWISE[kind]}/" for kind in sorted(others) if kind in _READ_OTHERWISE)
        return [self.terminal(" & ".join([*parts, *banned]))]

    def _array(self, schema: Schema, whole: Schema, path: str) -> str:
        if first_container(whole, self.root) != "array" or not self._reads_items(schema, whole):
            return json_rule(schema, self.root)
        first = schema.get("prefixItems")
        places = list(first) if isinstance(first, list) else []
        least, most = int(schema.get("minItems") or 0), schema.get("maxItems")
        if places and schema.get("items") in (None, False):  # a tuple of fixed length, as pydantic writes it
            most = len(places) if most is None else min(len(places), most)
        if leaf("", whole, self.root) != []:
            least = max(least, 1)
        if most is not None and most < least:
            return json_rule(schema, self.root)
        named = [self.element("item", part, f"{path}[{place}]") for place, part in enumerate(places[:most])]
        if most is None or most > len(named):
            item = self.element("item", schema.get("items", True), f"{path}[]")
            rest = "" if most is None else str(most - len(named))
            more = f"{item}{{{max(least - len(named), 0)},{rest}}}"
        else:
            more = ""
        for place in range(len(named) - 1, -1, -1):  # what lies beyond minItems may be left out from its end
            more = f"{named[place]} {more}".strip()
            more = more if place < least else f"({more})?"
        return self.rule(more) if more else json.dumps("")

    def _reads_items(self, schema: Schema, whole: Schema) -> bool:
        """Whether the reader types this array's items by its own `items`."""
        choices, _ = simple_schemas(whole, self.root)
        arrays = [c.schema for c in choices if c.type == "array" and c.values is None]
        return len(arrays) == 1 and {"type": "array", **arrays[0]} == schema

    def _object(self, schema: Schema, whole: Schema, path: str) -> str:
        if first_container(whole, self.root) != "object" or not self._reads_entries(schema, whole):
            return json_rule(schema, self.root)
        return self.entries(schema, path, empty=leaf("", whole, self.root) == {})

    def _reads_entries(self, schema: Schema, whole: Schema) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return False  # free names: one that came twice would be read as a list
        return all(self._alike(part, entry_schema(name, whole, self.root)) for name, part in _entries(schema).items())

    def _alike(self, schema: Any, read_by: Any) -> bool:
        if schema == read_by:
            return True
        types = [allowed_types(part, self.root) if isinstance(part, Mapping) else set() for part in (schema, read_by)]
        return types[0] == types[1] and not types[0] & {"array", "object"} and bool(types[0])

    def entries(self, schema: Schema, path: str, *, empty: bool = True) -> str:
        """The elements of an object, in the order of its properties."""
        required = set(schema.get("required") or ())
        found = [
            (self.element(name, part, f"{path}.{name}".lstrip(".")), name in required)
            for name, part in _entries(schema).items()
            if part is not False
        ]
        sequence = " ".join(element if needed else f"{element}?" for element, needed in found)
        if not empty and not any(needed for _, needed in found):
            starts = [
                " ".join([element, *(f"{later}?" for later, _ in found[place + 1 :])])
                for place, (element, _) in enumerate(found)
            ]
            return self.rule(" | ".join(starts)) if starts else json.dumps("{}")
        return self.rule(sequence) if sequence else json.dumps("")


def _entries(schema: Schema) -> dict[str, Any]:
    """Named properties, and names that are required without being described."""
    properties = schema.get("properties")
    named = dict(properties) if isinstance(properties, Mapping) else {}
    rest = schema.get("additionalProperties", True)
    return named | {name: rest for name in schema.get("required") or () if name not in named}


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
