"""Time limits, retries and generators: how one call runs beyond the ordinary."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import m3agent as m3
from m3agent.tools import execute
from m3agent.tools.execute import call_tool
from tests.agent.double import ScriptedRuntime, block, make_tokenizer
from tests.agent.double import call as written

pytestmark = pytest.mark.anyio


async def run(tool: m3.Tool[..., Any], progress: list[Any] | None = None, **arguments: Any) -> Any:
    seen = [] if progress is None else progress
    context = m3.Context(tool.name, "call_1", on_progress=seen.append)
    return await call_tool({tool.name: tool}, tool.name, arguments, context)


# Time limits ----------------------------------------------------------------------------------------------------------


async def test_an_asynchronous_tool_is_cancelled_at_its_limit() -> None:
    cleaned: list[str] = []

    @m3.tool(timeout=0.05)
    async def f() -> None:
        try:
            await anyio.sleep(600)
        finally:
            cleaned.append("yes")

    with anyio.fail_after(5), pytest.raises(m3.ToolError, match=r"^timed out after 0\.05 s$"):
        await run(f)
    assert cleaned == ["yes"]


async def test_a_synchronous_tool_is_told_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "GRACE", 0.2)
    release = threading.Event()

    @m3.tool(timeout=0.05)
    def polite(context: m3.Context) -> str:
        while not context.cancelled:
            time.sleep(0.005)
        return "late"

    @m3.tool(timeout=0.05)
    def deaf() -> None:
        release.wait(20)

    with pytest.raises(m3.ToolError, match=r"^timed out after 0\.05 s$"):
        await run(polite)
    with pytest.raises(m3.ToolError, match="did not stop within 0 s and was left running"):
        await run(deaf)
    release.set()


async def test_a_timeout_of_the_tools_own_is_an_ordinary_error() -> None:
    @m3.tool(timeout=60)
    async def f() -> None:
        raise TimeoutError("the server said nothing")

    with pytest.raises(m3.ToolError, match=r"^TimeoutError: the server said nothing$"):
        await run(f)


async def test_the_limit_of_one_call_leaves_the_others_alone(tmp_path: Path) -> None:
    @m3.tool(timeout=0.05)
    async def slow() -> None:
        await anyio.sleep(600)

    @m3.tool
    async def fast() -> str:
        await anyio.sleep(0.1)
        return "done"

    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(block(written("slow"), written("fast")), "So.")
    reply = await m3.Agent(runtime, tools=[slow, fast]).run("Go")
    assert [result.text for result in reply.messages[2].results] == ["timed out after 0.05 s", "done"]
    assert [result.error for result in reply.messages[2].results] == [True, False]


async def test_cancelling_the_run_is_no_timeout() -> None:
    @m3.tool(timeout=600)
    async def f() -> None:
        await anyio.sleep(600)

    with anyio.move_on_after(0.05) as scope:
        await run(f)
    assert scope.cancelled_caught


async def test_a_tool_that_swallows_cancellation_once_still_ends() -> None:
    """Cancellation comes again at every waiting point, so ignoring one does not help."""
    ignored: list[int] = []

    @m3.tool(timeout=0.05)
    async def stubborn() -> str:
        try:
            await anyio.sleep(600)
        except BaseException:
            ignored.append(1)
        await anyio.sleep(600)
        return "never"

    with anyio.fail_after(5), pytest.raises(m3.ToolError, match="timed out"):
        await run(stubborn)
    assert ignored == [1]


@pytest.mark.parametrize("by", ["its limit", "its scope"])
async def test_the_late_result_of_a_tool_that_swallows_every_cancellation_does_not_count(by: str) -> None:
    stuck, release = anyio.Event(), anyio.Event()
    swallowed = 0

    @m3.tool(timeout=0.05 if by == "its limit" else None)
    async def stubborn() -> str:
        nonlocal swallowed
        while not release.is_set():
            try:
                stuck.set()
                await release.wait()
            except BaseException:
                swallowed += 1
                release.set()
        return "late"

    context = m3.Context("stubborn", "call_1")

    async def cancel() -> None:
        await stuck.wait()
        context.scope.cancel()

    reason = r"^timed out after 0\.05 s$" if by == "its limit" else "^cancelled$"
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            if by == "its scope":
                group.start_soon(cancel)
            with pytest.raises(m3.ToolError, match=reason):
                await call_tool({"stubborn": stubborn}, "stubborn", {}, context)
    assert swallowed == 1


# Retries --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "FIRST_PAUSE", 0.001)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("failures", [0, 2, 3])
async def test_declared_exceptions_are_tried_again(failures: int) -> None:
    calls: list[int] = []

    @m3.tool(retries=2, retry_on=(ConnectionError,))
    def flaky() -> int:
        calls.append(1)
        if len(calls) <= failures:
            raise ConnectionResetError("gone")
        return len(calls)

    if failures <= 2:
        assert await run(flaky) == [str(failures + 1)]
    else:
        with pytest.raises(m3.ToolError, match="ConnectionResetError: gone"):
            await run(flaky)
    assert len(calls) == min(failures + 1, 3)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("error", [ValueError("x"), m3.ToolError("x")])
async def test_others_are_not(error: Exception) -> None:
    calls: list[int] = []

    @m3.tool(retries=5, retry_on=(OSError,))
    async def f() -> None:
        calls.append(1)
        raise error

    with pytest.raises(m3.ToolError):
        await run(f)
    assert calls == [1]


async def test_the_time_limit_holds_for_all_tries() -> None:
    @m3.tool(timeout=0.3, retries=100, retry_on=(OSError,))
    async def f() -> None:
        raise OSError

    with anyio.fail_after(5), pytest.raises(m3.ToolError, match="timed out"):
        await run(f)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"retries": -1, "retry_on": (OSError,)}, "retries is -1"),
        ({"retries": 1}, "belong together"),
        ({"retry_on": (OSError,)}, "belong together"),
        ({"retries": 1, "retry_on": OSError}, "tuple of exception classes"),
        ({"retries": 1, "retry_on": (KeyboardInterrupt,)}, "tuple of exception classes"),
        ({"timeouts": 3}, "no option 'timeouts'; there are: needs_approval, timeout"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], problem: str) -> None:
    def f() -> None: ...

    with pytest.raises(m3.ToolDefinitionError, match=problem):
        m3.tool(**options)(f)
    with pytest.raises(m3.ToolDefinitionError, match=problem):
        m3.Tool.from_schema("f", "", {"type": "object"}, lambda arguments: None, **options)


# Generators -----------------------------------------------------------------------------------------------------------


@m3.tool
async def count_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await anyio.sleep(0)
        yield i


@m3.tool
def count(n: int) -> Iterator[int]:
    yield from range(n)


@pytest.mark.parametrize("tool", [count, count_async])
async def test_values_are_progress_and_the_last_is_the_result(tool: m3.Tool[..., Any]) -> None:
    progress: list[Any] = []
    assert await run(tool, progress, n=3) == ["2"]
    assert progress == [0, 1, 2]
    assert await run(tool, n=0) == ["null"]


async def test_what_a_plain_generator_returns_is_the_result() -> None:
    @m3.tool
    def f() -> Iterator[str]:
        yield "half"
        return "whole"

    assert await run(f) == ["whole"]


async def test_generators_are_closed_when_they_fail_or_take_too_long() -> None:
    closed: list[str] = []

    @m3.tool(timeout=0.05)
    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await anyio.sleep(0.01)
        finally:
            closed.append("async")

    @m3.tool(timeout=0.05)
    def endless_plain() -> Iterator[int]:
        try:
            while True:
                yield 1
                time.sleep(0.005)
        finally:
            closed.append("plain")

    @m3.tool
    def failing() -> Iterator[int]:
        try:
            yield 1
            raise ValueError("no more")
        finally:
            closed.append("failing")

    for tool, reason in ((endless, "timed out"), (endless_plain, "timed out"), (failing, "no more")):
        with anyio.fail_after(5), pytest.raises(m3.ToolError, match=reason):
            await run(tool)
    assert closed == ["async", "plain", "failing"]


async def test_progress_reaches_the_stream(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(block(written("count_async", n="2")), "Two.")
    agent = m3.Agent(runtime, tools=[count_async])
    async with agent.session().stream("Go") as events:
        seen = [event.value async for event in events if isinstance(event, m3.ToolProgress)]
    assert seen == [0, 1]
    assert events.reply.messages[2].results[0].text == "1"


# What tools raise -----------------------------------------------------------------------------------------------------


class Odd(Exception):
    def __str__(self) -> str:
        return "x" * 10_000


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StopIteration("end"), "StopIteration"),
        (StopAsyncIteration(), "StopAsyncIteration"),
        (SystemExit(3), "SystemExit: 3"),
        (
            ExceptionGroup("g", [ValueError("one"), ExceptionGroup("h", [KeyError("two")])]),
            "ValueError: one; KeyError: 'two'",
        ),
        (Odd(), "Odd: xxx"),
        (RecursionError(), "RecursionError"),
        (MemoryError(), "MemoryError"),
        (GeneratorExit(), "GeneratorExit"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_odd_exceptions_become_short_texts(error: BaseException, text: str, kind: str) -> None:
    def plain() -> None:
        raise error

    async def asynchronous() -> None:
        raise error

    tool = m3.tool(plain if kind == "plain" else asynchronous)
    with pytest.raises(m3.ToolError) as caught:
        await run(tool)
    assert text in str(caught.value)
    assert len(str(caught.value)) <= 800


async def test_a_flood_of_text_is_held_off(tmp_path: Path) -> None:
    @m3.tool
    def flood() -> str:
        return "x" * 50_000_000

    runtime = ScriptedRuntime(make_tokenizer(tmp_path), context_length=5000).says(block(written("flood")), "Much.")
    reply = await m3.Agent(runtime, tools=[flood]).run("Go")
    assert reply.text == "Much."
    assert len(reply.messages[2].results[0].text) < 5000


async def test_a_tool_that_runs_its_own_session_is_told_so(tmp_path: Path) -> None:
    @m3.tool
    async def again(context: m3.Context) -> str:
        return (await context.session.run("And?")).text

    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(block(written("again")), "Well.")
    reply = await m3.Agent(runtime, tools=[again]).run("Go")
    assert "SessionBusy: this session runs already" in reply.messages[2].results[0].text
    assert reply.text == "Well."


async def test_two_sessions_share_a_tool_at_once(tmp_path: Path) -> None:
    both = anyio.Event()
    inside: list[int] = []

    @m3.tool
    async def meet(n: int) -> int:
        inside.append(n)
        if len(inside) == 2:
            both.set()
        await both.wait()
        return n

    async def one(n: int) -> None:
        folder = tmp_path / str(n)
        folder.mkdir()
        runtime = ScriptedRuntime(make_tokenizer(folder)).says(block(written("meet", n=str(n))), f"{n}")
        reply = await m3.Agent(runtime, tools=[meet]).run("Go")
        assert reply.messages[2].results[0].text == str(n)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(one, 1)
            group.start_soon(one, 2)
