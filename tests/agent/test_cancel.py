"""Cancelling at every waiting point, abandoned streams, tools under cancellation: the session always goes on."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import m3agent as m3
from m3agent.chat import Tokenizer
from m3agent.tools import execute
from tests.agent.double import Fuse, ScriptedRuntime, block, call
from tests.agent.going_on import agent, cancelled_at, check_goes_on

pytestmark = pytest.mark.anyio


def tools_with(fuse: Fuse) -> list[m3.Tool[..., Any]]:
    @m3.tool
    async def look(name: str) -> list[str | m3.Image]:
        await fuse.point()
        await fuse.point()
        return [name, m3.Image(np.zeros((28, 28, 3), np.uint8))]

    @m3.tool
    def count(n: int) -> int:
        return n

    return [look, count]


TURNS = (
    "é" + block(call("look", name="a"), call("count", n="1")),
    block(call("count", n="x")[:-20]),
    "End",
)


async def test_cancel_at_every_waiting_point_of_a_run(
    tokenizer: Tokenizer, fused_threads: Callable[[Fuse], None]
) -> None:
    points = 0
    blown = True
    while blown:
        points += 1
        fuse = Fuse(points)
        fused_threads(fuse)
        runtime = ScriptedRuntime(tokenizer, fuse=fuse).says(*TURNS)
        session = agent(runtime, *tools_with(fuse)).session()
        picture = m3.Image(np.full((28, 28, 3), 9, np.uint8))

        async def run(session: m3.Session = session, picture: m3.Image = picture) -> None:
            await session.run("Look.", picture)

        blown = await cancelled_at(runtime, fuse, run)
        assert blown or session.messages[-1].text == "End"
        for before, after in zip(session.messages, session.messages[1:], strict=False):
            assert len(before.calls) == len(after.results)
        await check_goes_on(runtime, session)
    assert points > 150


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
            st.sampled_from([block(call("count", n="1")), "x" + block(call("look", name="n"))]),
        ),
        max_size=3,
    ),
    points=st.lists(st.integers(1, 120), min_size=1, max_size=3),
)
def test_any_conversation_survives_any_cancellations(
    tokenizer: Tokenizer, anyio_backend: str, turns: list[str], points: list[int]
) -> None:
    async def main() -> None:
        runtime = ScriptedRuntime(tokenizer)
        session = agent(runtime, *tools_with(runtime.fuse)).session()
        for point in points:
            runtime.replies = [*turns, "end"]
            runtime.fuse.at, runtime.fuse.count = point, 0

            async def run() -> None:
                await session.run("Look.", max_turns=len(turns) + 1)

            await cancelled_at(runtime, runtime.fuse, run)
        runtime.fuse.at = None
        await check_goes_on(runtime, session)

    anyio.run(main, backend=anyio_backend)


async def test_cancelled_calls_get_a_result_and_finished_ones_keep_theirs(runtime: ScriptedRuntime) -> None:
    cleaned: list[str] = []
    scope = anyio.CancelScope()

    @m3.tool
    async def fast() -> str:
        return "here"

    @m3.tool
    async def slow() -> str:
        try:
            await anyio.sleep(0.02)
            scope.cancel()
            await anyio.sleep_forever()
        finally:
            cleaned.append("slow")
        return "never"

    session = agent(runtime.says(block(call("slow"), call("fast"))), slow, fast).session()
    with scope:
        await session.run("x")
    assert cleaned == ["slow"]
    first, second = session.messages[-1].results
    assert (first.text, first.error) == ("cancelled", True)
    assert (second.text, second.error) == ("here", False)
    await check_goes_on(runtime, session)


async def test_cancel_01_a_synchronous_tool_sees_the_cancellation_and_is_waited_for(runtime: ScriptedRuntime) -> None:
    seen: list[bool] = []
    started = threading.Event()

    @m3.tool
    def poll(context: m3.Context) -> None:
        started.set()
        while not context.cancelled:
            time.sleep(0.001)
        time.sleep(0.05)
        seen.append(True)

    session = agent(runtime.says(block(call("poll"))), poll).session()
    async with anyio.create_task_group() as group:
        group.start_soon(session.run, "x")
        while not started.is_set():
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()
    assert seen == [True]  # the run waited for the thread
    assert session.messages[-1].results[0].text == "cancelled"


async def test_cancel_01_a_synchronous_tool_that_does_not_listen_is_reported(
    runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "GRACE", 0.05)
    started, release = threading.Event(), threading.Event()

    @m3.tool
    def deaf() -> None:
        started.set()
        release.wait(10)

    session = agent(runtime.says(block(call("deaf"))), deaf).session()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "x")
            while not started.is_set():
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
        assert "left running" in session.messages[-1].results[0].text
    finally:
        release.set()


async def test_stream_03_leaving_the_block_stops_the_run(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("one two three")).session()
    async with session.stream("x") as events:
        async for event in events:
            if isinstance(event, m3.TextDelta) and event.text == "e":
                break
    assert session.messages[-1].text == "one"
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = events.reply
    await check_goes_on(runtime, session)


async def test_stream_03_a_dropped_stream_stops_the_run(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("one two three")).session()
    async for event in session.stream("x"):
        if isinstance(event, m3.TextDelta) and event.text == "e":
            break
    assert session.messages[-1].text == "one"  # at once, without a garbage collection
    await check_goes_on(runtime, session)
    session.stream("never read")
    gc.collect()
    await check_goes_on(runtime, session)


@pytest.mark.parametrize("block_form", [True, False])
async def test_stream_03_leaving_at_every_event(runtime: ScriptedRuntime, block_form: bool) -> None:
    last = 0
    done = False
    while not done:
        last += 1
        runtime.replies = list(TURNS)
        session = agent(runtime, *tools_with(runtime.fuse)).session()
        stream = session.stream("x")
        if block_form:
            async with stream as events:
                for _ in range(last):
                    done = isinstance(await anext(events), m3.Done)
        else:
            for _ in range(last):
                done = isinstance(await anext(stream), m3.Done)
            del stream
        for before, after in zip(session.messages, session.messages[1:], strict=False):
            assert len(before.calls) == len(after.results)
        await check_goes_on(runtime, session)


async def test_stream_03_a_consumer_cancelled_between_events(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("one two three")).session()
    with anyio.CancelScope() as scope:
        async with session.stream("x") as events:
            async for _ in events:
                scope.cancel()
                await anyio.sleep(1)
    assert session.messages[-1].text == "o"
    await check_goes_on(runtime, session)


async def test_cancel_05_a_stream_read_and_closed_in_other_tasks(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("one two three")).session()
    events = session.stream("x")
    read: list[Any] = []

    async def read_some() -> None:
        for _ in range(3):
            read.append(await anext(events))  # noqa: PERF401

    for step in (read_some, read_some, events.aclose, events.aclose):
        async with anyio.create_task_group() as group:
            group.start_soon(step)
    assert "".join(event.text for event in read) == "one tw"
    await check_goes_on(runtime, session)


@pytest.mark.parametrize("where", ["reading", "in a tool"])
async def test_cancel_05_a_stream_closed_while_another_task_waits_for_it(runtime: ScriptedRuntime, where: str) -> None:
    waiting = anyio.Event()
    cleaned: list[bool] = []

    @m3.tool
    async def forever() -> None:
        waiting.set()
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append(True)

    async def point() -> None:
        if len(session.tokens) > 1000 and where == "reading":
            waiting.set()
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()

    runtime.fuse.point = point  # pyright: ignore
    session = agent(runtime.says("Hm." + block(call("forever"))), forever).session()
    events = session.stream("x" * 600)
    ended: list[str] = []

    async def read() -> None:
        async for _ in events:
            pass
        ended.append("quietly")

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await waiting.wait()
        with pytest.raises(RuntimeError, match="another task is reading"):
            await anext(events)
        await events.aclose()
        # All is in order when it returns.
        assert cleaned == ([True] if where == "in a tool" else [])
        assert len(session.messages[-1].calls) == 0
    assert ended == ["quietly"]
    del runtime.fuse.point
    await check_goes_on(runtime, session)


async def test_what_is_no_tools_fault_ends_the_run_as_it_is(
    runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from m3agent.history import History

    async def prepare(self: History, result: m3.ToolResult) -> None:
        raise MemoryError("no room for patches")

    session = agent(runtime.says(block(call("count", n="1"))), *tools_with(runtime.fuse)).session()
    monkeypatch.setattr(History, "prepare", prepare)
    with pytest.raises(MemoryError, match="no room"):
        await session.run("x")
    monkeypatch.undo()
    assert session.messages[-1].results[0].text == "cancelled"
    await check_goes_on(runtime, session)


async def test_a_failing_model_leaves_a_session_that_goes_on(
    runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = agent(runtime.says("one two")).session()
    real = runtime.fuse.point

    async def point() -> None:
        if runtime.fuse.count == 5:
            raise m3.NumericalError("logits are not finite")
        await real()

    monkeypatch.setattr(runtime.fuse, "point", point)
    with pytest.raises(m3.NumericalError):
        await session.run("x")
    monkeypatch.undo()
    assert session.messages[-1].text == "one "
    await check_goes_on(runtime, session)


def test_asyncio_timeouts_and_task_cancellation(tokenizer: Tokenizer) -> None:
    """asyncio's own cancellation, which knows nothing of cancel scopes."""

    async def main() -> None:
        runtime = ScriptedRuntime(tokenizer)

        @m3.tool
        async def forever() -> None:
            await asyncio.sleep(60)

        session = agent(runtime.says(block(call("forever"))), forever).session()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.run("x")
        await check_goes_on(runtime, session)
        runtime.says(block(call("forever")))
        task = asyncio.create_task(session.run("x"))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await check_goes_on(runtime, session)

    asyncio.run(main())
