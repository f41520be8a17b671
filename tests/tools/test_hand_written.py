"""Tools with a hand-written schema: what the model is shown, what is refused, what the function gets."""

from __future__ import annotations

from typing import Any

import jsonschema
import pydantic
import pytest

import m3agent as m3
from m3agent.tools.execute import call_tool

pytestmark = pytest.mark.anyio
TREE = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"root": {"$ref": "#/definitions/node"}, "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["root"],
    "definitions": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "children": {"items": {"$ref": "#/definitions/node"}}},
            "required": ["name"],
        }
    },
}  # fmt: skip


async def run(tool: m3.Tool[..., Any], **arguments: Any) -> list[Any]:
    return await call_tool({tool.name: tool}, tool.name, arguments, m3.Context(tool.name, "call_7"))


async def test_the_function_gets_the_values_and_the_context() -> None:
    def plain(arguments: dict[str, Any]) -> Any:
        return arguments

    async def informed(arguments: dict[str, Any], context: m3.Context) -> str:
        return f"{context.call_id} {sorted(arguments)}"

    root = {"name": "a", "children": [{"name": "context"}]}
    tool = m3.Tool.from_schema("tree", "A tree.", TREE, plain)
    assert tool.definition == {
        "name": "tree", "description": "A tree.", "parameters": {k: v for k, v in TREE.items() if k != "$schema"},
    }  # fmt: skip
    (text,) = await run(tool, root=root)
    assert text == '{"root": {"name": "a", "children": [{"name": "context"}]}}'
    assert await run(m3.Tool.from_schema("tree", "", TREE, informed), root=root) == ["call_7 ['root']"]


async def test_what_does_not_fit_goes_back_and_the_function_is_not_called() -> None:
    def never(arguments: dict[str, Any]) -> None:
        raise AssertionError

    tool = m3.Tool.from_schema("tree", "", TREE, never)
    for arguments, line in [
        ({}, "arguments: 'root' is a required property"),
        ({"root": {"name": "a", "children": [{"name": 3}]}}, r"root\.children\.0\.name: 3 is not of type 'string'"),
        ({"root": {"name": "a"}, "size": "x"}, "size: 'x' is not of type"),
        ({"root": {"name": ["x" * 9000]}}, r"^Invalid arguments for tree:\nroot.name: .{0,200}$"),
    ]:
        with pytest.raises(m3.ToolError, match=line):
            await run(tool, **arguments)


def test_what_is_no_schema_is_refused() -> None:
    def function(arguments: dict[str, Any]) -> None: ...
    def three(arguments: dict[str, Any], a: int, b: int) -> None: ...

    for schema, reason in [
        ({"type": "string"}, "describes no object"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, r"wrong at properties\.a\.type: 'strin'"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, r"refers to '#/\$defs/b', which is not in it"),
        ({"type": "object", "properties": {"a": {"$ref": "http://x.invalid/s"}}}, "refers to 'http://x.invalid/s'"),
        ({"type": "object", "properties": {"a>b": {}}}, "parameter name 'a>b' contains '>'"),
        ({"type": "object", "default": {1, 2}}, "is no JSON: Object of type set"),
    ]:
        with pytest.raises(m3.ToolDefinitionError, match=reason):
            m3.Tool.from_schema("t", "", schema, function)
    with pytest.raises(m3.ToolDefinitionError, match="takes the arguments as one dict"):
        m3.Tool.from_schema("t", "", {"type": "object"}, three)
    with pytest.raises(m3.ToolDefinitionError, match="tool name 'two words'"):
        m3.Tool.from_schema("two words", "", {"type": "object"}, function)


# References ----------------------------------------------------------------------------------------------------------

OUTSIDE = "http://x.invalid/s"


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples"])
@pytest.mark.parametrize("place", ["properties", "patternProperties", "$defs", "dependentSchemas"])
def test_a_reference_under_the_name_of_a_keyword_is_a_reference(name: str, place: str) -> None:
    with pytest.raises(m3.ToolDefinitionError, match=f"refers to '{OUTSIDE}'"):
        made({place: {name: {"$ref": OUTSIDE}}})


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$dynamicRef": OUTSIDE}, f"refers to '{OUTSIDE}'"),
        ({"items": {"not": {"contains": {"$dynamicRef": "#nobody"}}}}, "refers to '#nobody'"),
        ({"$ref": "#/x-parts/a"}, f"refers to '{OUTSIDE}'"),  # where only a reference leads
        ({"$ref": "#/x-parts/list/one"}, "refers to '#/x-parts/list/one'"),
        ({"$ref": "#/x-parts/list/7"}, "refers to '#/x-parts/list/7'"),
        ({"$ref": "#/type"}, "refers to '#/type', which is no schema"),
        ({"$ref": "#/type/deeper"}, "refers to '#/type/deeper'"),
        ({"$ref": "#/$defs/self"}, r"at \$defs.self, its schema leads back to itself"),
        ({"$ref": "#/$defs/one"}, r"at \$defs.(one|two), its schema leads back to itself"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/properties/a"}]}, "at a, its schema leads back to itself"),
        ({"if": {}, "then": {"$dynamicRef": "#here"}, "$dynamicAnchor": "here"}, "at a, its schema leads back"),
    ],
)
def test_references_lead_to_a_schema_inside(schema: dict[str, Any], reason: str) -> None:
    known = {
        "self": {"$ref": "#/$defs/self"},
        "one": {"$ref": "#/$defs/two"},
        "two": {"allOf": [{"$ref": "#/$defs/one"}]},
    }
    used = {name: part for name, part in known.items() if "$defs" in str(schema)}
    with pytest.raises(m3.ToolDefinitionError, match=reason):
        made({"properties": {"a": schema}, "$defs": used, "x-parts": {"a": {"$ref": OUTSIDE}, "list": [{}]}})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"default": {"$ref": OUTSIDE}, "enum": [{"$ref": OUTSIDE}, 1], "examples": [{"$ref": OUTSIDE}]}, 1, 2),
        ({"const": {"$ref": OUTSIDE}}, {"$ref": OUTSIDE}, 1),
        ({"properties": {"$ref": {"type": "string"}}, "type": "object"}, {"$ref": OUTSIDE}, {"$ref": 1}),
        ({"items": {"$ref": "#/properties/a"}, "type": "array"}, [[], [[]]], [[1]]),
        ({"type": "object", "additionalProperties": {"$ref": "#"}}, {"b": {"a": {}}}, {"b": {"a": 1}}),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$dynamicRef": "#node"}}], "$dynamicAnchor": "node"},
         [[None]], [1]),
        ({"$id": "http://m3.invalid/a", "$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, 1, "x"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*guided decoding:UserWarning")
def test_references_that_are_none_or_lead_somewhere_are_taken(schema: dict[str, Any], good: Any, bad: Any) -> None:
    tool = made({"properties": {"a": schema}})
    assert tool.validate({"a": good}) == {"a": good}
    with pytest.raises(m3.ToolError, match=r"^Invalid arguments for t:\na"):
        tool.validate({"a": bad})


@pytest.mark.filterwarnings("ignore:.*guided decoding:UserWarning")
async def test_a_reference_found_late_is_an_error_of_the_call() -> None:
    """Keywords of old drafts are not read for references."""
    draft = "http://json-schema.org/draft-03/schema#"
    tool = made({"$schema": draft, "properties": {"a": {"extends": [{"$ref": OUTSIDE}]}}})
    with pytest.raises(m3.ToolError, match=f"t cannot be called: its schema refers to '{OUTSIDE}'"):
        await run(tool, a=1)


async def test_whatever_a_validator_raises_is_an_error_of_the_call() -> None:
    class Careless(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            return {1: 2}[n]

    @m3.tool
    def typed(value: Careless) -> None: ...

    with pytest.raises(m3.ToolError, match=r"^Invalid arguments for typed: KeyError: 7$"):
        await run(typed, value={"n": 7})
    with pytest.raises(m3.ToolError, match=r"^Invalid arguments for t: OverflowError"):
        await run(made({"properties": {"n": {"type": "integer", "multipleOf": 0.5}}}), n=10**400)


def test_a_schema_that_is_changed_later_changes_nothing() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = m3.Tool.from_schema("t", "", schema, lambda arguments: None)
    schema["properties"]["a"]["type"] = "string"
    assert tool.parameters["properties"] == {"a": {"type": "integer"}}
    assert tool.validate({"a": 1}) == {"a": 1}


# Formats -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2026-02-28", "2026-02-30"),
        ("email", "a@example.org", "nobody"),
        ("ipv4", "127.0.0.1", "256.1.1.1"),
        ("ipv6", "::1", ":::"),
        ("uuid", "6f1e2a3b-0000-4000-8000-000000000000", "6f1e2a3b"),
        ("regex", "^a$", "("),
    ],
)
@pytest.mark.filterwarnings("ignore:.*guided decoding:UserWarning")
def test_formats_are_checked(name: str, good: str, bad: str) -> None:
    tool = made({"properties": {"a": {"type": "string", "format": name}}})
    assert tool.unchecked == ()
    assert tool.validate({"a": good}) == {"a": good}
    with pytest.raises(m3.ToolError, match=f"^Invalid arguments for t:\na: .* is not a '{name}'$"):
        tool.validate({"a": bad})


def test_formats_that_nothing_checks_are_named() -> None:
    string = {"type": "string"}
    with pytest.warns(
        UserWarning, match=r"hold the model to b\[\]: format;.*but the formats b\[\]: sku are not checked"
    ):
        tool = made({"properties": {"a": {**string, "format": "date"}, "b": {"items": {**string, "format": "sku"}}}})
    assert tool.unenforced == ("b[]: format",)
    assert tool.unchecked == ("b[]: sku",)
    assert tool.validate({"b": ["anything"]}) == {"b": ["anything"]}
    assert m3.tool(lambda: 1, name="f").unchecked == ()


def test_what_a_missing_package_would_check_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checkers = jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers
    monkeypatch.delitem(checkers, "date")
    tool = made({"properties": {"a": {"type": "string", "format": "date"}}})  # the guide holds to it: no warning
    assert tool.unchecked == ("a: date",)


def made(schema: dict[str, Any]) -> m3.Tool[..., Any]:
    return m3.Tool.from_schema("t", "", {"type": "object", **schema}, lambda arguments: arguments)
