"""Values by schema, names that cannot be written, and arguments that come back as they were written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3agent.chat import (
    CallFinished,
    ChatCall,
    ChatMessage,
    Detokenizer,
    ReplyParser,
    Tokenizer,
    check_tool_names,
    encode,
    render,
)
from m3agent.chat.values import leaf
from m3agent.errors import ToolDefinitionError

from .conftest import outside_text, tokenizer_json

TOKENIZER = Tokenizer(tokenizer_json())
STRING_OR_NULL = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({}, "17", "17"),
        ({"type": "string"}, "null", "null"),
        (STRING_OR_NULL, "NULL", None),
        (STRING_OR_NULL, " null", " null"),
        ({"type": "integer"}, " 007\n", 7),
        ({"type": "integer"}, "1_000", "1_000"),
        ({"type": "integer"}, "+5", "+5"),
        ({"type": "integer"}, "٣", "٣"),
        ({"type": "integer"}, "7.5", 7.5),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "1" * 40, int("1" * 40)),
        ({"type": "number"}, "5.0", 5),
        ({"type": "number"}, "1e2", 100),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-Infinity", "-Infinity"),
        ({"type": "boolean"}, " TRUE ", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["integer", "boolean"]}, "1", 1),
        ({"type": "array"}, " ", []),
        ({"type": "object"}, "", {}),
        ({"type": ["object", "string"]}, " ", " "),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
        ({"type": "object"}, '{"a": 1e999}', '{"a": 1e999}'),
        ({"type": "object"}, '{"a": "b\nc"}', '{"a": "b\nc"}'),
        ({"type": "object"}, '{"a": 1} x', '{"a": 1} x'),
        ({"type": "object"}, '{"a": ', '{"a": '),
        ({"type": "array"}, r'["\ud83d\ude00"]', ["\U0001f600"]),
        ({"type": "array"}, r'["\ud800"]', r'["\ud800"]'),
        ({"type": "object"}, "[1]", [1]),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["array", "string"]}, "[1, 2]", [1, 2]),
        ({"anyOf": [{"type": "null"}, {"oneOf": [{"type": "integer"}]}]}, "3", 3),
        ({"const": 3}, "3", 3),
        ({"enum": ["a", None]}, "null", None),
        ({"$ref": "#/$defs/Size"}, "4", 4),
        ({"$ref": "#/$defs/Loop"}, "4", "4"),
        ({"$ref": "#/nowhere/at/all"}, "4", "4"),
        ({"$ref": "#/$defs/List/anyOf/1"}, "4", 4),
        ({"$ref": "#/$defs/List/anyOf/2"}, "4", "4"),
        ({"$ref": "#/$defs/of%20one"}, "4", 4),
        ({"$ref": "#size"}, "4", 4),
        ({"$dynamicRef": "#size"}, "4", 4),
        ({"$ref": "#type"}, "4", "4"),
        ({"$ref": "http://x.invalid/s"}, "4", "4"),
    ],
)
def test_a_leaf_is_read_by_its_schema(schema: dict[str, Any], text: str, value: Any):
    size = {"type": "integer", "$anchor": "size"}
    listed = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    root = {"$defs": {"Size": size, "of one": size, "List": listed, "Loop": {"$ref": "#/$defs/Loop"}}}
    got = leaf(text, schema, root)
    assert got == value
    assert type(got) is type(value)


def read(arguments: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Arguments through rendering, ids, detokenizing and parsing."""
    turn = ChatMessage("assistant", ["ok"], None, [ChatCall("f", arguments)])
    return parsed(encode(render([turn], generation_prompt=False), TOKENIZER).ids, parameters)


def parsed(ids: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
    start = max(at for at, number in enumerate(ids) if number == TOKENIZER.control_id("]~b]"))
    parser = ReplyParser([{"name": "f", "parameters": parameters}], tokens=True)
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [piece for number in ids[start + 1 :] for piece in detokenizer.push(number)]
    events = [event for text, control in pieces for event in parser.feed(text, control)]
    (call,) = [event for event in [*events, *parser.finish()] if isinstance(event, CallFinished)]
    return call.arguments


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=">"), min_size=1, max_size=8).filter(
    lambda name: name.strip() and not name.startswith("/") and name != "tool_call" and name.split()[:1] != ["invoke"]
)
leaves = st.one_of(
    st.tuples(st.just({"type": "string"}), outside_text),
    st.tuples(st.just({"type": "integer"}), st.integers()),
    st.tuples(st.just({"type": "number"}), st.floats(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def array(pair: tuple[dict[str, Any], Any], length: int) -> tuple[dict[str, Any], Any]:
        return {"type": "array", "items": pair[0]}, [pair[1]] * length

    def record(pairs: dict[str, tuple[dict[str, Any], Any]]) -> tuple[dict[str, Any], Any]:
        properties = {name: schema for name, (schema, _) in pairs.items()}
        return {"type": "object", "properties": properties}, {name: value for name, (_, value) in pairs.items()}

    return st.builds(array, inner, st.integers(0, 3)) | st.builds(record, st.dictionaries(names, inner, max_size=3))


@given(st.dictionaries(names, st.recursive(leaves, containers, max_leaves=8), max_size=4))
def test_arguments_come_back_as_they_were_written(pairs: dict[str, tuple[dict[str, Any], Any]]):
    parameters = {"type": "object", "properties": {name: schema for name, (schema, _) in pairs.items()}}
    arguments = {name: value for name, (_, value) in pairs.items()}
    check_tool_names({"name": "f", "parameters": parameters})
    got = read(arguments, parameters)
    assert got == arguments
    assert list(got) == list(arguments)


@pytest.mark.parametrize(
    ("schema", "value", "got"),
    [
        ({}, [1, "a"], ["1", "a"]),
        ({}, {"item": "x"}, ["x"]),
        ({"type": "object"}, {"item": 1}, {"item": "1"}),
        ({"type": "object"}, [1, 2], {"item": ["1", "2"]}),
        ({"type": "array", "items": {"type": "integer"}}, {"a": 1, "b": 2}, [1, 2]),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]}, [1], [1]),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": 1}),
        ({"$ref": "#/$defs/Box"}, {"w": 2, "in": {"w": 3}}, {"w": 2, "in": {"w": 3}}),
        ({"oneOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}]},
         {"a": 1, "b": 2}, {"a": 1, "b": 2}),
    ],
)  # fmt: skip
def test_children_are_typed_by_the_schema(schema: dict[str, Any], value: Any, got: Any):
    box = {"type": "object", "properties": {"w": {"type": "integer"}, "in": {"$ref": "#/$defs/Box"}}}
    assert read({"p": value}, {"properties": {"p": schema}, "$defs": {"Box": box}}) == {"p": got}


def test_stray_text_beside_children_makes_an_object_that_validation_refuses():
    text = '§<tool_call>§<invoke name="f">§<p>a §<$text>b§</$text> c§<$$text>d§</$$text>§</p>§</invoke>'
    parser = ReplyParser([{"name": "f", "parameters": {"properties": {"p": {"type": "string"}}}}])
    events = [*parser.feed(text.replace("§", "]<]minimax[>[")), *parser.finish()]
    assert events[-1] == CallFinished(0, "f", {"p": {"$text": "b", "$$text": "d", "$$$text": "a  c"}})


def test_a_repeated_list_is_a_list_of_lists():
    text = '§<tool_call>§<invoke name="f">§<p>[1]§</p>§<q>x§</q>§<p>[2]§</p>§</invoke>'
    parser = ReplyParser([{"name": "f", "parameters": {"properties": {"p": {"type": "array"}}}}])
    events = [*parser.feed(text.replace("§", "]<]minimax[>[")), *parser.finish()]
    assert events[-1] == CallFinished(0, "f", {"p": [[1], [2]], "q": "x"})


@pytest.mark.parametrize(
    "name", ["", " ", "a>b", "/a", "invoke", "tool_call", "invoke name", "]<]minimax[>[", "x" * 2000]
)  # fmt: skip
def test_parameter_names_that_cannot_be_written_are_refused(name: str):
    nested = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/D"}, {"properties": {name: {}}}]}}
    for parameters in (
        {"properties": {name: {"type": "string"}}},
        {"properties": {"fine": nested}},
        {"properties": {}, "$defs": {"properties": {"type": "object", "properties": {name: {}}}}},
    ):
        with pytest.raises(ToolDefinitionError, match=r"tool 'f': parameter name .* rename"):
            check_tool_names({"name": "f", "parameters": parameters})


@pytest.mark.parametrize("name", ["", " ", "a b", 'a"b', "a>b", "a'b", "x" * 600, None])
def test_tool_names_that_cannot_be_written_are_refused(name: Any):
    with pytest.raises(ToolDefinitionError, match="tool name"):
        check_tool_names({"name": name})


def test_names_of_common_tools_are_fine():
    names = ["-A", "x.y", "$ref", "properties", "enum", "item", "invoked", "tool_calls", "name", "type", "think", "a b"]
    check_tool_names(
        {"name": "my-tool_2.run", "parameters": {"properties": {name: {"enum": ["invoke"]} for name in names}}}
    )
    check_tool_names({"name": "ping"})
