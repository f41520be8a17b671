"""Guided decoding: what the grammar lets through is read back as a value that the schema accepts, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import m3agent as m3
from m3agent.chat import CallDamaged, CallFinished, ChatCall, Tokenizer, encode
from m3agent.chat.elements import write_calls
from m3agent.chat.grammar import unenforced
from m3agent.chat.segments import SegmentWriter
from m3agent.errors import GuideError
from m3agent.runtime import Runtime, Sampling
from m3agent.runtime.guide import Guides
from m3agent.runtime.runtime import Opening
from tests.agent.double import END, NS, ids_of
from tests.runtime.guided import parameters, read, schemas, tool, walk
from tests.runtime.tiny import write_tokenizer
from tests.test_examples import needs_nano

pytestmark = pytest.mark.anyio
CHECKER = jsonschema.FormatChecker()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture
async def runtime(opening: Callable[..., Opening]) -> AsyncIterator[Runtime]:
    async with opening(cache_tokens=4096) as runtime:
        yield runtime


def check(value: Any, schema: Any) -> None:
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator, format_checker=CHECKER)


@given(st.lists(parameters(), min_size=1, max_size=2), st.integers(0, 2**32))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_are_valid(tokenizer: Tokenizer, schema: dict[str, Any], seed: int) -> None:
    guide = Guides(tokenizer, tokenizer.size).turn([], "disabled", schema)
    assert guide is not None
    ids = walk(guide, tokenizer, [], seed)
    check(json.loads(tokenizer.decode(ids[:-1])), schema)


REFERENCES = [
    "#/$defs/size",
    "#/$defs/of%20one",
    "#/properties/b/anyOf/0",  # as zod writes them
    "#/x-sizes/1/size",
    "#size",
]


@pytest.mark.parametrize("reference", REFERENCES)
def test_references_of_every_spelling_are_held_to(tokenizer: Tokenizer, reference: str) -> None:
    size = {"type": "integer", "minimum": 5, "maximum": 7}
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": reference},
            "b": {"anyOf": [size, {"type": "object", "additionalProperties": {"$ref": reference}}]},
            "c": {"type": "object", "additionalProperties": {"$ref": reference}},
        },
        "required": ["a", "b", "c"],
        "$defs": {"size": {"$anchor": "size", **size}, "of one": {"$ref": "#/$defs/size"}},
        "x-sizes": [{}, {"size": size}],
    }
    assert unenforced(schema) == ()
    for seed in range(10):
        guide = guide_of(tokenizer, [tool(schema)], "disabled")
        events = read(walk(guide, tokenizer, [tokenizer.control[NS]], seed), [tool(schema)], tokenizer)
        calls = [event for event in events if isinstance(event, CallFinished)]
        assert calls
        for call in calls:
            check(call.arguments, schema)


def guide_of(tokenizer: Tokenizer, tools: list[dict[str, Any]], thinking: Any = "adaptive", answer: Any = None) -> Any:
    return Guides(tokenizer, tokenizer.size).turn(tools, thinking, answer)


def accepts(guide: Any, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the guide lets this turn through; markers of the format are control tokens."""
    for token in ids_of(text, tokenizer):
        allowed = guide.allowed()
        if allowed is not None and not allowed[token]:
            return False
        guide.accept(token)
    return True


STOCK = tool(
    {
        "type": "object",
        "properties": {
            "sku": {"type": "string"},
            "count": {"type": "integer", "minimum": 1, "maximum": 12},
            "where": {"enum": ["north", "south"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
        "required": ["sku"],
    },
    "stock",
)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ("<sku>A 1</sku>", True),
        ("<sku></sku>", True),
        ("<sku></invoke></sku>", True),  # without the namespace token it is text
        ("<sku>x</sku><count>12</count>", True),
        ("<sku>x</sku><count>13</count>", False),
        ("<sku>x</sku><count>two</count>", False),
        ("<count>2</count>", False),  # sku is required
        ("<sku>x</sku><where>east</where>", False),
        ("<sku>x</sku><where>north</where><tags><item>a</item><item>b</item></tags>", True),
        ("<sku>x</sku><tags>a</tags>", False),
        ("<sku>x</sku><more>1</more>", False),
        ("<sku>x</sku><note>seven 7</note>", True),
        ("", False),
    ],
)
def test_a_call_is_held_to_its_schema(tokenizer: Tokenizer, arguments: str, fits: bool) -> None:
    marked = re.sub(r"</?(?:sku|count|where|tags|item|note|more)>", lambda tag: NS + tag[0], arguments)
    text = f'Look: {NS}<tool_call>\n{NS}<invoke name="stock">{marked}{NS}</invoke>\n{NS}</tool_call>{END}'
    assert accepts(guide_of(tokenizer, [STOCK]), tokenizer, text) is fits


def test_only_the_tools_that_there_are_can_be_called(tokenizer: Tokenizer) -> None:
    assert not accepts(guide_of(tokenizer, [STOCK]), tokenizer, f'{NS}<tool_call>\n{NS}<invoke name="buy">')
    assert not accepts(guide_of(tokenizer, [STOCK]), tokenizer, f"{NS}<tool_call>\n{NS}</tool_call>")


def test_text_and_thinking_are_free(tokenizer: Tokenizer) -> None:
    """Nothing is masked there: a guide that returns None costs the engine nothing."""
    guide = guide_of(tokenizer, [STOCK], "adaptive")
    for token in ids_of(f"<mm:think>{NS}<tool_call> or not?</mm:think>Hello <tool_call> ", tokenizer):
        assert guide.allowed() is None
        guide.accept(token)
    guide.accept(tokenizer.control[NS])
    allowed = guide.allowed()
    assert allowed.sum() == 1
    assert allowed[tokenizer.control["<tool_call>"]]


@pytest.mark.parametrize("thinking", ["adaptive", "enabled", "disabled"])
def test_an_answer_comes_after_thinking(tokenizer: Tokenizer, thinking: str) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    thought = {"adaptive": "<mm:think>hm [</mm:think>", "enabled": "hm [</mm:think>", "disabled": ""}[thinking]
    assert accepts(guide_of(tokenizer, [], thinking, schema), tokenizer, f"{thought}[1, 2]{END}")
    assert not accepts(guide_of(tokenizer, [], thinking, schema), tokenizer, f"{thought}Sure: [1, 2]{END}")
    assert not accepts(guide_of(tokenizer, [], thinking, schema), tokenizer, f"{thought}[1, 2{END}")
    call = f'{NS}<tool_call>\n{NS}<invoke name="stock">{NS}<sku>a{NS}</sku>{NS}</invoke>\n{NS}</tool_call>{END}'
    assert accepts(guide_of(tokenizer, [STOCK], thinking, schema), tokenizer, thought + call)


def test_a_rendered_call_is_let_through(tokenizer: Tokenizer) -> None:
    """What the chat format writes of valid arguments, the grammar accepts: a model trained on it is never bent."""
    arguments = {"sku": "A\n1", "count": 3, "where": "south", "tags": ["", "two"], "note": 5}
    out = SegmentWriter()
    write_calls([ChatCall("stock", arguments)], out)
    guide = guide_of(tokenizer, [STOCK], "disabled")
    for token in [*encode(out.done(), tokenizer).ids, tokenizer.control[END]]:
        allowed = guide.allowed()
        assert allowed is None or allowed[token]
        guide.accept(token)


def test_what_is_not_held_to_is_named(tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "b": {"type": "object", "properties": {"c": {"type": "string", "pattern": "^(?=x).*$"}}},
            "d": {"type": "string", "format": "date"},
        },
    }
    assert unenforced(schema) == ("a: uniqueItems", "b.c: pattern")


async def test_a_model_with_random_weights_calls_well(runtime: Runtime) -> None:
    """Every call that was completed is valid; the engine masks for greedy and for sampled tokens alike."""
    schema = {
        "type": "object",
        "properties": {
            "where": {"enum": ["north", "south", 3, None]},
            "count": {"type": "integer", "minimum": 5, "maximum": 7},
            "open": {"type": "boolean"},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "boolean"}, {"const": "x"}],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "required": ["count", "pair"],
    }
    tools = [tool(schema, "f"), tool({"type": "object", "properties": {}}, "g")]
    ns, complete = runtime.tokenizer.control[NS], 0
    for seed in range(12):
        guide = runtime.guides.turn(tools, "disabled")
        assert guide is not None
        guide.accept(ns)
        sequence = runtime.sequence()
        sequence.append([*runtime.tokenizer.encode("Go."), ns])
        async with sequence.generate(Sampling(0.0 if seed == 0 else 1.0, seed=seed, max_tokens=600), guide) as stream:
            ids = [token.id async for token in stream]
        events = read([ns, *ids], tools, runtime.tokenizer)
        calls = [event for event in events if isinstance(event, CallFinished)]
        for call in calls:
            check(call.arguments, schema if call.name == "f" else {"maxProperties": 0})
        complete += bool(calls)
        assert stream.finish in ("stop", "length")
        sequence.close()
    assert complete >= 9  # the others went on making calls


async def test_a_guide_that_fails_ends_its_own_request_alone(runtime: Runtime) -> None:
    class Broken:
        def allowed(self) -> None:
            raise GuideError("broken")

        def accept(self, token: int) -> None: ...

    sequence, other = runtime.sequence(), runtime.sequence()
    sequence.append([1, 2, 3])
    other.append([1, 2, 3])
    async with sequence.generate(Sampling(0.0, max_tokens=3), Broken()) as stream:
        with pytest.raises(GuideError, match="broken"):
            await anext(stream)
    async with other.generate(Sampling(0.0, max_tokens=3)) as stream:
        assert [token async for token in stream]


def test_a_schema_without_any_value_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(GuideError, match="no grammar"):
        guide_of(tokenizer, [], "disabled", {"type": "integer", "minimum": 5, "maximum": 1})


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.7, top_p=0.5), Sampling(1.0, top_k=3), Sampling(1.0, min_p=0.2)]
)
async def test_masks_hold_with_every_cut_and_log_probabilities_stay_the_models(
    runtime: Runtime, sampling: Sampling
) -> None:
    schema = {"enum": ["north", "south"]}
    sequence = runtime.sequence()
    sequence.append([1, 2, 3])
    expected = (await sequence.logits()).log_softmax(0)
    guide = runtime.guides.turn([], "disabled", schema)
    async with sequence.generate(replace(sampling, seed=1, max_tokens=20), guide) as stream:
        tokens = [token async for token in stream]
    assert runtime.tokenizer.decode(token.id for token in tokens[:-1]) in ('"north"', '"south"')
    assert stream.finish == "stop"
    # Of the first token (a quotation mark, which was forced) the model thought little, and that is what is told.
    assert tokens[0].logprob == pytest.approx(float(expected[tokens[0].id]), abs=1e-4)
    sequence.close()


async def test_a_guide_belongs_to_one_call(runtime: Runtime) -> None:
    """A stream that is left in the middle of a call, and a fork after it, go on with guides of their own."""
    guide = runtime.guides.turn([STOCK], "disabled")
    assert guide is not None
    ns = runtime.tokenizer.control[NS]
    guide.accept(ns)
    sequence = runtime.sequence()
    sequence.append([1, 2, ns])
    async with sequence.generate(Sampling(0.0, max_tokens=50), guide) as stream:
        await anext(stream)
        await anext(stream)
    assert runtime.tokenizer.decode(sequence.tokens[2:]) == f"{NS}<tool_call>\n"
    other = sequence.fork()
    async with other.generate(Sampling(0.0, max_tokens=3), runtime.guides.turn([STOCK], "disabled")) as stream:
        assert len([token async for token in stream]) > 0  # free text again: the guide knows of its own turn alone
    sequence.close()
    other.close()


@needs_nano
async def test_m3_nano_draws_the_same_with_and_without_a_guide() -> None:
    async with Runtime.open() as nano:
        drawn = []
        for guided in (True, False):
            agent = m3.Agent(nano, tools=[draw], sampling=Sampling(0.0), guided=guided)
            async with agent.session() as session:
                await session.run("Draw this picture.", m3.Image(np.full((224, 224, 3), 90, np.uint8)), max_turns=2)
                drawn.append(session.tokens)
        assert drawn[0] == drawn[1]
        assert NS in nano.tokenizer.decode(drawn[0])


@m3.tool(name="render", description="Render SVG code and look at the picture.")
def draw(code: str) -> m3.Image:
    return m3.loops.SvgRenderer().render(code)
