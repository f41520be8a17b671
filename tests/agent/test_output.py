"""`output=`: a typed answer, from the request to the model to the value that the program gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field
from typing_extensions import TypedDict

import m3agent as m3
from m3agent.output import output_of
from tests.agent.double import ScriptedRuntime, block, call, make_tokenizer
from tests.runtime.tiny import CONFIG, write_checkpoint

pytestmark = pytest.mark.anyio


class Article(BaseModel):
    """An article of the shop."""

    sku: str
    price: Annotated[float, Field(ge=0)]


@dataclass
class Point:
    x: int
    y: int = 0


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Row(TypedDict):
    a: int


@m3.tool
def stock(sku: str) -> int:
    return len(sku)


@pytest.fixture
def runtime(tmp_path: Path) -> ScriptedRuntime:
    return ScriptedRuntime(make_tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Article, '{"sku": "a", "price": 2}', Article(sku="a", price=2)),
        (list[Article], '[{"sku": "a", "price": 2}]', [Article(sku="a", price=2)]),
        (Point, '{"x": 1}', Point(1)),
        (Node, '{"name": "a", "children": [{"name": "b"}]}', Node(name="a", children=[Node(name="b")])),
        (int, "7", 7),
        (Literal["yes", "no"], '"yes"', "yes"),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (Article | None, "null", None),
        (dict[str, int], '{"a": 1}', {"a": 1}),
    ],
)
async def test_the_answer_is_the_value(runtime: ScriptedRuntime, kind: object, text: str, value: object) -> None:
    reply = await m3.Agent(runtime.says(text)).run("Which?", output=kind)
    assert reply.output == value
    assert reply.text == text
    assert reply.messages[0].text.startswith("Which?\n\nAnswer with JSON that fits this schema, and nothing else:\n{")


async def test_tools_come_before_the_answer(runtime: ScriptedRuntime) -> None:
    runtime.says(block(call("stock", sku="abc")), "3")
    reply = await m3.Agent(runtime, tools=[stock]).run("How many?", output=int)
    assert reply.output == 3
    assert [message.role for message in reply.messages] == ["user", "assistant", "tool", "assistant"]


async def test_without_output_there_is_none(runtime: ScriptedRuntime) -> None:
    reply = await m3.Agent(runtime.says("Hello.")).run("Hi")
    assert reply.output is None


async def test_what_the_schema_cannot_say_is_asked_for_again(runtime: ScriptedRuntime) -> None:
    def even(number: int) -> int:
        if number % 2:
            raise ValueError("it has to be even")
        return number

    runtime.says("3", "4")
    reply = await m3.Agent(runtime).run("A number.", output=Annotated[int, AfterValidator(even)])
    assert reply.output == 4
    assert "it has to be even" in reply.messages[2].text

    runtime.says("3", "5", "7")
    reply = await m3.Agent(runtime).run("A number.", output=Annotated[int, AfterValidator(even)])
    assert reply.stop == "end"
    with pytest.raises(m3.NoOutput, match="it has to be even"):
        _ = reply.output


async def test_a_limit_leaves_no_output(runtime: ScriptedRuntime) -> None:
    reply = await m3.Agent(runtime.says("[1, 2, 3]")).run("Numbers.", output=list[int], max_tokens=3)
    assert reply.stop == "tokens"
    with pytest.raises(m3.NoOutput, match="before an answer: tokens"):
        _ = reply.output


async def test_a_type_without_a_schema_is_refused_before_anything_is_said(runtime: ScriptedRuntime) -> None:
    session = m3.Agent(runtime).session()
    with pytest.raises(m3.ToolDefinitionError, match="output=Thing: there is no JSON schema"):
        await session.run("Hi", output=type("Thing", (), {}))
    assert session.messages == []


def test_the_schema_is_small() -> None:
    assert output_of(Article).schema == {
        "type": "object",
        "description": "An article of the shop.",
        "properties": {"sku": {"type": "string"}, "price": {"type": "number", "minimum": 0}},
        "required": ["sku", "price"],
    }
    assert output_of(Row).schema["required"] == ["a"]


async def test_a_model_with_random_weights_answers_in_the_type(tmp_path: Path) -> None:
    """Sampled at temperature 1 from noise: only the guide makes an answer of it."""
    write_checkpoint(tmp_path, replace(CONFIG, text=replace(CONFIG.text, max_position_embeddings=16384)))
    async with m3.Runtime.open(tmp_path, cache_tokens=16384) as runtime:
        agent = m3.Agent(runtime, thinking="disabled", tools=[stock])
        for seed in range(4):
            reply = await agent.run(
                "Which?", output=Literal["north", "south"], sampling=m3.Sampling(1.0, seed=seed), max_turns=3
            )
            assert reply.stop == "turns" or reply.output in ("north", "south")
        assert runtime.stats().used_pages == 0
