"""What goes wrong around a run: tools that close their session, questions nobody answers, hundreds of runs dropped."""

from __future__ import annotations

import gc
import os
import random
import threading

import anyio
import pytest

import m3agent as m3
from m3agent.chat import Tokenizer
from tests.agent.double import ScriptedRuntime, block, call
from tests.agent.going_on import check_goes_on

pytestmark = pytest.mark.anyio


async def test_a_tool_that_closes_its_own_session(runtime: ScriptedRuntime) -> None:
    @m3.tool
    async def leave(context: m3.Context) -> str:
        await context.session.close()
        return "closed"

    runtime.says(block(call("leave")), "Bye")
    session = m3.Agent(runtime, tools=[leave]).session()
    with anyio.fail_after(10):
        with pytest.raises(m3.M3Error, match="closed"):
            await session.run("Go")
    assert runtime.closed_sequences == 1
    with pytest.raises(m3.M3Error, match="closed"):
        await session.run("Again")


async def test_a_run_cancelled_while_nobody_answers_a_question(runtime: ScriptedRuntime) -> None:
    asked, ended, ran = anyio.Event(), anyio.Event(), []

    async def approve(_: m3.ToolCall) -> bool:
        asked.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        return True

    @m3.tool(needs_approval=True)
    def delete(name: str) -> str:
        ran.append(name)
        return "gone"

    @m3.tool
    def count(n: int) -> int:
        return n

    runtime.says(block(call("delete", name="a"), call("delete", name="b")))
    session = m3.Agent(runtime, tools=[delete, count], approve=approve).session()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run, "Go")
            await asked.wait()
            tasks.cancel_scope.cancel()
    assert ended.is_set()
    assert not ran
    assert [part.text for part in session.messages[-1].results] == ["cancelled", "cancelled"]
    await check_goes_on(runtime, session)


async def test_two_hundred_runs_dropped_at_random_instants_leave_nothing(tokenizer: Tokenizer) -> None:
    """Cancelled, closed, left and forgotten: no task, thread, file or sequence stays, and each session goes on."""
    inside = 0

    @m3.tool
    async def wait(seconds: float) -> str:
        nonlocal inside
        inside += 1
        try:
            await anyio.sleep(seconds)
        finally:
            inside -= 1
        return "waited"

    @m3.tool
    def count(n: int) -> int:
        return n

    runtime = ScriptedRuntime(tokenizer)
    both = block(call("wait", seconds="0.01"), call("count", n="1"))
    sessions = [m3.Agent(runtime, tools=[wait, count]).session() for _ in range(200)]

    async def drop(session: m3.Session, seed: int) -> None:
        chance = random.Random(seed)
        way, instant = chance.choice(("cancel", "close", "leave", "forget")), chance.uniform(0, 0.03)
        if way == "cancel":
            with anyio.move_on_after(instant):
                await session.run("Go")
            return
        if way == "close":
            stream = session.stream("Go")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, stream)
                await anyio.sleep(instant)
                await stream.aclose()
            return
        events = session.stream("Go")
        left = chance.randrange(20)
        if way == "leave":
            async with events:
                await read(events, left)
        else:
            await read(events, left)

    async def read(stream: m3.RunStream, at_most: int = 1_000_000) -> None:
        async for _ in stream:
            at_most -= 1
            if at_most < 0:
                return

    # One session first, so that what is started once for all of them (worker threads, say) is there already.
    runtime.says(both, "End")
    async with m3.Agent(runtime, tools=[wait, count]).session() as first:
        await first.run("Go")
    tasks, threads, descriptors = _tasks(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    runtime.replies = [both, "End"] * 400
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for seed, session in enumerate(sessions):
                group.start_soon(drop, session, seed)
        gc.collect()
        runtime.replies = ["Fine"] * 200
        for session in sessions:
            assert (await session.run("And now?")).text == "Fine"
            await session.close()
    assert inside == 0
    assert runtime.closed_sequences == 201
    del sessions, session
    gc.collect()
    with anyio.fail_after(10):
        while _tasks() > tasks:
            await anyio.sleep(0.01)
    assert threading.active_count() <= threads + 40  # idle worker threads of the backend, which it keeps and reuses
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def _tasks() -> int:
    return len(anyio.get_running_tasks())
