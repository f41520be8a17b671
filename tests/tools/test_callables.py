"""Tools of whatever can be called: partials, objects, classes, decorated functions; and the context with a type."""

from __future__ import annotations

import functools
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

import m3agent as m3
from m3agent.tools.execute import call_tool

pytestmark = pytest.mark.anyio


async def run(tool: m3.Tool[..., Any], told: list[Any] | None = None, /, **arguments: Any) -> Any:
    told = [] if told is None else told
    context = m3.Context(tool.name, "call_1", deps=Store("Lisbon"), on_progress=told.append)
    return await call_tool({tool.name: tool}, tool.name, arguments, context)


@dataclass
class Store:
    town: str


# Partials ------------------------------------------------------------------------------------------------------------


def find(root: Path, name: str, deep: bool = False, *, most: int = 10) -> str:
    """Find files.

    Args:
        root: where to look
        name: what to look for
        most: how many at most
    """
    return f"{root} {name} {deep} {most}"


SHOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "what to look for"},
        "deep": {"type": "boolean", "default": False},
    },
    "required": ["name"],
}


def updated(function: Any) -> Any:
    """As people do to give a partial its name; it then looks as if nothing were bound."""
    return functools.update_wrapper(function, function.func)


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(find, Path("a"), most=3),
        functools.partial(functools.partial(find, Path("a")), most=3),
        functools.partial(find, root=Path("a"), most=3),
        updated(functools.partial(find, Path("a"), most=3)),
        updated(functools.partial(find, root=Path("a"), most=3)),
    ],
    ids=["by position", "twice", "by name", "updated", "updated, by name"],
)
async def test_what_a_partial_binds_is_not_for_the_model(function: Callable[..., str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the docstring describes bound parameters, too
        tool = m3.tool(function)
    assert tool.definition == {"name": "find", "description": "Find files.", "parameters": SHOWN}
    assert await run(tool, name="x", deep=True) == ["a x True 3"]
    for wrong in ({"name": "x", "root": "/"}, {"name": "x", "most": 99}):
        with pytest.raises(m3.ToolError, match="there is no such parameter"):
            await run(tool, **wrong)


async def test_partials_of_other_things() -> None:
    class Shelf:
        def take(self, n: int, m: int) -> int:
            """Take some."""
            return n * 10 + m

        def __call__(self, n: int, m: int) -> int:
            return n + m

    async def later(n: int, context: m3.Context, m: int = 1) -> str:
        return f"{n} {m} {context.call_id}"

    def rest(first: int, *others: int) -> str:
        return f"{first} {others}"

    def ends(n: int, /, m: int) -> int:
        return n - m

    own = functools.partial(find, Path("a"))
    own.__doc__ = "Its own words."
    assert m3.tool(own).description == "Its own words."
    for function, arguments, result in [
        (functools.partial(Shelf().take, 4), {"m": 2}, "42"),
        (functools.partial(Shelf.take, Shelf(), m=2), {"n": 4}, "42"),
        (functools.partial(Shelf(), 40), {"m": 2}, "42"),
        (functools.partial(later, 7), {"m": 2}, "7 2 call_1"),
        (functools.partial(rest, 1), {"others": [2, 3]}, "1 (2, 3)"),
        (functools.partial(ends, m=1), {"n": 43}, "42"),
    ]:
        tool = m3.tool(function)
        kinds = {part.get("type") for part in tool.parameters["properties"].values()}
        assert kinds <= {"integer", "array"}, tool.parameters
        assert await run(tool, **arguments) == [result]
    assert m3.tool(functools.partial(Shelf().take, 4)).definition["description"] == "Take some."
    assert m3.tool(functools.partial(Shelf(), 40)).name == "Shelf"


async def test_a_partial_with_a_hand_written_schema() -> None:
    def lookup(store: Store, arguments: dict[str, Any]) -> str:
        """Look something up."""
        return f"{store.town}: {arguments['n']}"

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = m3.tool(functools.partial(lookup, Store("Porto")), schema=schema)
    assert tool.definition == {"name": "lookup", "description": "Look something up.", "parameters": schema}
    assert await run(tool, n=3) == ["Porto: 3"]


# Hand-written schemas, by the decorator ------------------------------------------------------------------------------


async def test_the_decorator_takes_a_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 2}}, "required": ["n"]}

    @m3.tool(schema=schema, name="twice", timeout=3)
    async def function(arguments: dict[str, Any], context: m3.Context) -> str:
        """Two times n.

        Args:
            arguments: whatever
        """
        return f"{context.tool} {arguments['n'] * 2}"

    assert function.definition == {"name": "twice", "description": "Two times n.", "parameters": schema}
    assert function.timeout == 3
    assert await run(function, n=2) == ["twice 4"]
    with pytest.raises(m3.ToolError, match="n: 3 is not a multiple of 2"):
        await run(function, n=3)
    assert m3.tool(lambda arguments: "x", name="f", description="D", schema=schema).description == "D"
    with pytest.raises(m3.ToolDefinitionError, match="takes the arguments as one dict"):
        m3.tool(lambda a, b, c: "x", name="f", schema=schema)
    with pytest.raises(m3.ToolDefinitionError, match="describes no object"):
        m3.tool(lambda arguments: "x", name="f", schema={})


# Objects, classes, decorators -----------------------------------------------------------------------------------------


class Counts:
    """Counts up."""

    async def __call__(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            await anyio.sleep(0)
            yield i


class CountsPlainly:
    def __call__(self, n: int) -> Iterator[int]:
        yield from range(n)


class Adds:
    async def __call__(self, n: int) -> int:
        await anyio.sleep(0)
        return n


async def counting(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


@pytest.mark.parametrize(
    "function",
    [
        Counts(),
        CountsPlainly(),
        functools.partial(Counts()),
        functools.partial(counting),
        functools.wraps(counting)(lambda n: counting(n)),
    ],
    ids=["async object", "object", "partial of an object", "partial", "wrapped"],
)
async def test_progress_of_whatever_generates(function: Any) -> None:
    told: list[Any] = []
    tool = m3.tool(function, name="count")
    assert tool.parameters["properties"] == {"n": {"type": "integer"}}
    assert await run(tool, told, n=3) == ["2"]
    assert told == [0, 1, 2]


async def test_an_object_with_an_asynchronous_call_runs_in_the_loop() -> None:
    assert m3.tool(Counts()).definition["description"] == "Counts up."
    assert await run(m3.tool(Adds()), n=3) == ["3"]


async def test_a_class_is_a_tool_that_makes_one() -> None:
    tool = m3.tool(Store)
    assert tool.parameters["properties"] == {"town": {"type": "string"}}
    assert await run(tool, town="Faro") == ['{"town": "Faro"}']


async def test_a_decorator_may_make_an_asynchronous_function_synchronous() -> None:
    async def later(n: int) -> int:
        await anyio.sleep(0)
        return n + 1

    @functools.wraps(later)
    def now(n: int) -> int:
        return anyio.run(later, n)

    assert await run(m3.tool(now), n=1) == ["2"]


# The context ---------------------------------------------------------------------------------------------------------


async def test_the_context_may_say_what_its_deps_are() -> None:
    @m3.tool
    async def where(context: m3.Context[Store], n: int = 0, other: m3.Context[Store] | None = None) -> str:
        assert other is context
        return context.deps.town

    assert where.parameters == {"type": "object", "properties": {"n": {"type": "integer", "default": 0}}}
    assert await run(where) == ["Lisbon"]
    tool = m3.Tool.from_schema("f", "", {"type": "object"}, lambda arguments: "")
    assert await run(tool) == [""]

    def by_hand(arguments: dict[str, Any], context: m3.Context[Store]) -> str:
        return context.deps.town

    assert await run(m3.Tool.from_schema("f", "", {"type": "object"}, by_hand)) == ["Lisbon"]
