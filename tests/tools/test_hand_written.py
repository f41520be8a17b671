"""Tools with a hand-written schema: what the model is shown, what is refused, what the function gets."""

from __future__ import annotations

from typing import Any

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
    ]:
        with pytest.raises(m3.ToolDefinitionError, match=reason):
            m3.Tool.from_schema("t", "", schema, function)
    with pytest.raises(m3.ToolDefinitionError, match="takes the arguments as one dict"):
        m3.Tool.from_schema("t", "", {"type": "object"}, three)
    with pytest.raises(m3.ToolDefinitionError, match="tool name 'two words'"):
        m3.Tool.from_schema("two words", "", {"type": "object"}, function)
