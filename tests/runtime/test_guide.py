"""Guided decoding: what the grammar lets through is read back as a value that the schema accepts, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3agent.chat import CallDamaged, CallFinished, Tokenizer
from m3agent.runtime.guide import Guides
from tests.runtime.guided import parameters, read, schemas, tool, walk
from tests.runtime.tiny import write_tokenizer

CHECKER = jsonschema.FormatChecker()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


def check(value: Any, schema: Any) -> None:
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator, format_checker=CHECKER)


@given(st.lists(parameters(), min_size=1, max_size=2), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calls_are_valid(tokenizer: Tokenizer, parameters: list[dict[str, Any]], seed: int) -> None:
    tools = [tool(schema, f"f{index}") for index, schema in enumerate(parameters)]
    guide = Guides(tokenizer, tokenizer.size).turn(tools, "disabled")
    assert guide is not None
    begin = [*tokenizer.encode("Let me see."), tokenizer.control["]<]minimax[>["]]
    events = read(walk(guide, tokenizer, begin, seed), tools, tokenizer)
    calls = [event for event in events if isinstance(event, CallFinished)]
    assert calls
    assert not [event for event in events if isinstance(event, CallDamaged)]
    for call in calls:
        check(call.arguments, {tool["name"]: tool["parameters"] for tool in tools}[call.name])


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_are_valid(tokenizer: Tokenizer, schema: dict[str, Any], seed: int) -> None:
    guide = Guides(tokenizer, tokenizer.size).turn([], "disabled", schema)
    assert guide is not None
    ids = walk(guide, tokenizer, [], seed)
    check(json.loads(tokenizer.decode(ids[:-1])), schema)
