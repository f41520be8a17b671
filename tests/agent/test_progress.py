"""Events while tools run: they come when things happen, and a stream can be read, closed and dropped anywhere."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import m3agent as m3
from m3agent.calls import UNREAD_PROGRESS
from tests.agent.double import ScriptedRuntime, block, call, check_log
from tests.agent.going_on import agent, check_goes_on

pytestmark = pytest.mark.anyio


class Gate:
    """A tool that reports, then waits until the test lets it go on."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.cleaned: list[str] = []

        @m3.tool
        async def gated(name: str, context: m3.Context) -> str:
            await context.progress(f"{name} waits")
            try:
                await self.open.wait()
            finally:
                self.cleaned.append(name)
            return name

        self.tool = gated


@m3.tool
async def quick(name: str) -> str:
    return name


async def read_until(stream: m3.RunStream, kind: type[Any]) -> Any:
    async for event in stream:
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} came")


async def test_progress_and_ends_come_while_other_calls_run(runtime: ScriptedRuntime) -> None:
    gate = Gate()
    runtime.says(block(call("gated", name="a"), call("quick", name="b")), "ok")
    session = agent(runtime, gate.tool, quick).session()
    async with session.stream("x") as stream:
        progress = await read_until(stream, m3.ToolProgress)
        assert (progress.call_id, progress.value) == ("call_1", "a waits")
        finished = await read_until(stream, m3.ToolFinished)
        assert (finished.result.call_id, finished.result.text) == ("call_2", "b")
        assert finished.seconds >= 0
        gate.open.set()
        rest = [event async for event in stream]
    kinds = [type(event) for event in rest]
    assert kinds[:3] == [m3.ToolFinished, m3.ToolResultEvent, m3.ToolResultEvent]
    assert [event.result.text for event in rest[1:3]] == ["a", "b"]  # in call order
    assert [result.text for result in session.messages[2].results] == ["a", "b"]
    check_log(runtime, session)


async def test_tools_go_on_while_nobody_reads(runtime: ScriptedRuntime) -> None:
    gate = Gate()
    session = agent(runtime.says(block(call("gated", name="a")), "ok"), gate.tool).session()
    async with session.stream("x") as stream:
        await read_until(stream, m3.ToolProgress)
        gate.open.set()
        while not gate.cleaned:
            await anyio.lowlevel.checkpoint()
        assert (await read_until(stream, m3.Done)).reply.text == "ok"


@pytest.mark.parametrize("how", ["leave", "close", "cancel"])
async def test_a_stream_left_while_tools_run_has_ended_them(runtime: ScriptedRuntime, how: str) -> None:
    gate = Gate()
    runtime.says(block(call("gated", name="a"), call("quick", name="b")))
    session = agent(runtime, gate.tool, quick).session()
    stream = session.stream("x")
    with anyio.CancelScope() as scope:
        async with stream:
            await read_until(stream, m3.ToolFinished)
            if how == "cancel":
                scope.cancel()
                await anext(stream)
            elif how == "close":
                await stream.aclose()
    assert gate.cleaned == ["a"]  # already, not some time later
    assert [result.text for result in session.messages[-1].results] == ["cancelled", "b"]
    await check_goes_on(runtime, session)


async def test_a_stream_dropped_while_tools_run(runtime: ScriptedRuntime) -> None:
    gate = Gate()
    runtime.says(block(call("gated", name="a"), call("quick", name="b")))
    session = agent(runtime, gate.tool, quick).session()
    stream = session.stream("x")
    await read_until(stream, m3.ToolFinished)
    del stream
    assert [result.text for result in session.messages[-1].results] == ["cancelled", "b"]  # at once
    await check_goes_on(runtime, session)
    assert gate.cleaned == ["a"]  # the next run waited for it


async def test_a_dropped_tools_cleaning_up_is_waited_for_by_the_next_run(runtime: ScriptedRuntime) -> None:
    steps: list[str] = []
    release = anyio.Event()

    @m3.tool
    async def slow_to_leave(context: m3.Context) -> None:
        await context.progress(1)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()
            steps.append("left")

    session = agent(runtime.says(block(call("slow_to_leave")), "ok"), slow_to_leave).session()
    stream = session.stream("x")
    await read_until(stream, m3.ToolProgress)
    del stream

    async def again() -> None:
        await session.run("y")
        steps.append("ran")

    async with anyio.create_task_group() as group:
        group.start_soon(again)
        await anyio.wait_all_tasks_blocked()
        assert not steps
        release.set()
    assert steps == ["left", "ran"]
    check_log(runtime, session)


async def test_a_stream_is_read_and_closed_by_different_tasks_while_tools_run(runtime: ScriptedRuntime) -> None:
    gate = Gate()
    session = agent(runtime.says(block(call("gated", name="a"))), gate.tool).session()
    stream = session.stream("x")

    async def read_some() -> None:
        await read_until(stream, m3.ToolProgress)

    for step in (read_some, stream.aclose, stream.aclose):
        async with anyio.create_task_group() as group:
            group.start_soon(step)
    assert gate.cleaned == ["a"]
    await check_goes_on(runtime, session)


async def test_several_tasks_close_one_stream_and_all_wait(runtime: ScriptedRuntime) -> None:
    release = anyio.Event()
    left: list[bool] = []

    @m3.tool
    async def slow_to_leave(context: m3.Context) -> None:
        await context.progress(1)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()

    session = agent(runtime.says(block(call("slow_to_leave"))), slow_to_leave).session()
    stream = session.stream("x")
    await read_until(stream, m3.ToolProgress)

    async def close() -> None:
        await stream.aclose()
        left.append(True)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(close)
        await anyio.wait_all_tasks_blocked()
        assert not left
        release.set()
    assert len(left) == 3
    await check_goes_on(runtime, session)


async def test_a_tool_may_close_the_stream_that_runs_it(runtime: ScriptedRuntime) -> None:
    streams: list[m3.RunStream] = []

    @m3.tool
    async def stop() -> None:
        await streams[0].aclose()

    for between_reads in (False, True):
        session = agent(runtime, stop).session()
        runtime.replies = [block(call("stop"))]
        streams[:] = [session.stream("x")]
        with anyio.fail_after(10):
            async for event in streams[0]:
                if between_reads and isinstance(event, m3.TurnFinished):
                    for _ in range(20):
                        await anyio.lowlevel.checkpoint()
        assert session.messages[-1].results[0].text == "cancelled"
        await check_goes_on(runtime, session)


async def test_tools_see_the_context_variables_of_the_reader(runtime: ScriptedRuntime) -> None:
    request = contextvars.ContextVar("request", default="none")

    @m3.tool
    async def which() -> str:
        return request.get()

    @m3.tool
    def which_in_a_thread() -> str:
        return request.get()

    request.set("17")
    session = agent(runtime.says(block(call("which"), call("which_in_a_thread")), "ok"), which, which_in_a_thread)
    reply = await session.run("x")
    assert [result.text for result in reply.messages[2].results] == ["17", "17"]


async def test_deps_and_session_reach_the_tools(runtime: ScriptedRuntime) -> None:
    seen: list[Any] = []

    @m3.tool
    async def look(context: m3.Context) -> None:
        seen.append((context.deps, context.session, len(context.session.messages)))

    session = agent(runtime.says(block(call("look")), "ok"), look).session()
    database = object()
    await session.run("x", deps=database)
    assert seen == [(database, session, 2)]


async def test_a_calls_own_scope_ends_that_call_alone(runtime: ScriptedRuntime) -> None:
    cleaned: list[bool] = []

    @m3.tool
    async def stops(context: m3.Context) -> None:
        try:
            context.scope.cancel()
            await anyio.sleep_forever()
        finally:
            cleaned.append(context.cancelled)

    session = agent(runtime.says(block(call("stops"), call("quick", name="b")), "ok"), stops, quick).session()
    assert (await session.run("x")).text == "ok"
    first, second = session.messages[2].results
    assert (first.text, first.error, second.text) == ("cancelled", True, "b")
    assert len(cleaned) == 1


async def test_reports_from_a_thread_and_more_of_them_than_anyone_reads(runtime: ScriptedRuntime) -> None:
    main = threading.get_ident()

    @m3.tool
    def flood(context: m3.Context) -> str:
        assert threading.get_ident() != main
        for number in range(3 * UNREAD_PROGRESS):
            context.report(number)
        return "done"

    session = agent(runtime.says(block(call("flood")), "ok"), flood).session()
    async with session.stream("x") as stream:
        await read_until(stream, m3.TurnFinished)
        values = [event.value async for event in stream if isinstance(event, m3.ToolProgress)]
    assert values == sorted(values)
    assert 0 < len(values) <= 3 * UNREAD_PROGRESS
    assert session.messages[2].results[0].text == "done"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_callback_sees_every_event_before_the_iterator(runtime: ScriptedRuntime, asynchronous: bool) -> None:
    told: list[m3.Event] = []

    async def later(event: m3.Event) -> None:
        await anyio.lowlevel.checkpoint()
        told.append(event)

    on_event = later if asynchronous else told.append
    session = agent(runtime.says("Hm." + block(call("quick", name="a")), "ok"), quick).session()
    async with session.stream("x", on_event=on_event) as stream:
        read: list[m3.Event] = []
        async for event in stream:
            read.append(event)
            assert told == read
    assert isinstance(told[-1], m3.Done)
    runtime.says("again")
    told.clear()
    reply = await session.run("y", on_event=on_event)
    assert told[-1] == m3.Done(reply)


async def test_a_callback_that_raises_ends_the_run(runtime: ScriptedRuntime) -> None:
    def on_event(event: m3.Event) -> None:
        if isinstance(event, m3.TurnFinished):
            raise ZeroDivisionError("a bug")

    session = agent(runtime.says(block(call("quick", name="a"))), quick).session()
    with pytest.raises(ZeroDivisionError):
        await session.run("x", on_event=on_event)
    assert session.messages[-1].results[0].text == "cancelled"
    await check_goes_on(runtime, session)
