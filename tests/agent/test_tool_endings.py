"""Exceptions of tools that are no `Exception`: what the model is told, and what ends the run."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest

import m3agent as m3
from tests.agent.double import ScriptedRuntime, block, call
from tests.agent.going_on import agent, check_goes_on

pytestmark = pytest.mark.anyio


class Quit(BaseException):
    """The program's own."""


def plain(error: BaseException) -> Callable[..., Any]:
    def fails() -> None:
        raise error

    return fails


def asynchronous(error: BaseException) -> Callable[..., Any]:
    async def fails() -> None:
        raise error

    return fails


def generator(error: BaseException) -> Callable[..., Any]:
    def fails() -> Iterator[int]:
        yield 1
        raise error

    return fails


def async_generator(error: BaseException) -> Callable[..., Any]:
    async def fails() -> AsyncIterator[int]:
        yield 1
        raise error

    return fails


@m3.tool
async def fine() -> str:
    return "fine"


KINDS = [plain, asynchronous, generator, async_generator]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(2), "SystemExit: 2"),
        (GeneratorExit(), "RuntimeError: the tool raised GeneratorExit"),
        (asyncio.CancelledError(), "RuntimeError: the tool raised CancelledError"),
        (concurrent.futures.CancelledError(), "CancelledError"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_the_model_is_told(
    runtime: ScriptedRuntime, kind: Callable[..., Any], error: BaseException, text: str
) -> None:
    session = agent(runtime.says(block(call("fails"), call("fine")), "I see."), m3.tool(kind(error)), fine).session()
    reply = await session.run("Go")
    failed, other = reply.messages[2].results
    assert (failed.error, failed.text.strip(": ")) == (True, text)
    assert other.text == "fine"
    assert reply.text == "I see."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Quit("now")], ids=repr)
async def test_what_ends_the_run_as_it_is(
    runtime: ScriptedRuntime, kind: Callable[..., Any], error: BaseException
) -> None:
    ended: list[str] = []

    @m3.tool
    async def slow() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("slow")

    session = agent(runtime.says(block(call("slow"), call("fails"))), m3.tool(kind(error)), slow).session()
    with anyio.fail_after(10), pytest.raises(type(error)) as caught:
        await session.run("Go")
    assert caught.value is error
    assert ended == ["slow"]
    assert [result.text for result in session.messages[-1].results] == ["cancelled", "cancelled"]
    await check_goes_on(runtime, session)


def test_a_tool_that_waits_for_what_was_cancelled_is_not_cancelled(runtime: ScriptedRuntime) -> None:
    @m3.tool
    async def waits() -> str:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task
        return "never"

    async def main() -> None:
        reply = await agent(runtime.says(block(call("waits")), "I see."), waits).run("Go")
        assert reply.messages[2].results[0].text == "RuntimeError: the tool raised CancelledError"

    asyncio.run(main())


async def test_errors_while_a_tool_is_cancelled_at_its_limit_are_the_calls(runtime: ScriptedRuntime) -> None:
    """A group of a cancellation and an error is no `Exception` under trio."""

    @m3.tool(timeout=0.05)
    async def group() -> None:
        async def fails() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                raise ValueError("not now")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails)
            tasks.start_soon(anyio.sleep_forever)

    reply = await agent(runtime.says(block(call("group")), "I see."), group).run("Go")
    assert reply.messages[2].results[0].text == "ValueError: not now"
