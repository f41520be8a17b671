"""Cancelling at every instant of approvals, progress, hooks and callbacks, in every way there is to cancel."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import m3agent as m3
from m3agent.chat import Tokenizer
from tests.agent.double import Fuse, ScriptedRuntime, block, call, check_log
from tests.agent.going_on import agent, cancelled_at, check_goes_on

pytestmark = pytest.mark.anyio

TURNS = (
    "é" + block(call("erase", name="a"), call("look", name="b"), call("count", n="1"), call("erase", name="c")),
    "End",
)


def session_with(runtime: ScriptedRuntime, fuse: Fuse, **options: Any) -> m3.Session:
    """Tools, hooks and a predicate that wait, all at the fuse."""

    @m3.tool
    async def look(name: str, context: m3.Context) -> str:
        await context.progress(1)
        await fuse.point()
        await context.progress(2)
        return name

    async def asks(name: str) -> bool:
        await fuse.point()
        return True

    @m3.tool(needs_approval=asks)
    async def erase(name: str) -> str:
        try:
            await fuse.point()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
        return name

    @m3.tool
    def count(n: int) -> int:
        return n

    async def hook(*arguments: Any) -> None:
        await fuse.point()

    hooks = m3.Hooks(before_model=hook, after_model=hook, before_tool=hook, after_tool=hook)
    return agent(runtime, look, erase, count, hooks=hooks, **options).session()


async def told(fuse: Fuse, event: m3.Event) -> None:
    await fuse.point()


def check_whole(session: m3.Session) -> None:
    """Every call has a result, or all that have none are pending in their order."""
    for before, after in zip(session.messages, session.messages[1:], strict=False):
        if after is not session.messages[-1] or not session.pending:
            assert [call.id for call in before.calls] == [result.call_id for result in after.results]
    if session.messages:
        waiting = [call.id for call in session.pending]
        assert waiting in ([], ["call_1", "call_4"])


async def test_cancel_at_every_instant_before_and_after_a_pause(
    tokenizer: Tokenizer, fused_threads: Callable[[Fuse], None]
) -> None:
    points, blown, paused = 0, True, 0
    while blown:
        points += 1
        fuse = Fuse(points)
        fused_threads(fuse)
        runtime = ScriptedRuntime(tokenizer, fuse=fuse).says(*TURNS)
        session = session_with(runtime, fuse)

        async def run(session: m3.Session = session, fuse: Fuse = fuse) -> None:
            reply = await session.run("Look.", on_event=lambda event: told(fuse, event))
            assert reply.stop == "approval"
            approve = {"call_1": True, "call_4": "no"}
            reply = await session.run(approve=approve, on_event=lambda event: told(fuse, event))
            assert reply.text == "End"

        blown = await cancelled_at(runtime, fuse, run)
        paused += bool(session.pending)
        check_whole(session)
        await check_goes_on(runtime, session)
    assert points > 150
    assert 1 <= paused < 30


async def test_cancel_at_every_instant_with_a_callback(
    tokenizer: Tokenizer, fused_threads: Callable[[Fuse], None]
) -> None:
    points, blown = 0, True
    while blown:
        points += 1
        fuse = Fuse(points)
        fused_threads(fuse)
        runtime = ScriptedRuntime(tokenizer, fuse=fuse).says(*TURNS)

        async def approve(call: m3.ToolCall, fuse: Fuse = fuse) -> bool:
            await fuse.point()
            return call.id == "call_1"

        session = session_with(runtime, fuse, approve=approve)

        async def run(session: m3.Session = session) -> None:
            await session.run("Look.")

        blown = await cancelled_at(runtime, fuse, run)
        assert session.pending == ()
        check_whole(session)
        await check_goes_on(runtime, session)
    assert points > 100


class Then:
    """A fuse's scope: what else can be done at its point."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.cancel = cancel


async def test_close_from_another_task_at_every_instant(tokenizer: Tokenizer) -> None:
    points, blown = 0, True
    while blown:
        points += 1
        fuse = Fuse(points)
        runtime = ScriptedRuntime(tokenizer, fuse=fuse).says(*TURNS)
        session = session_with(runtime, fuse)
        async with anyio.create_task_group() as group:
            stream = session.stream("Look.", on_event=lambda event, fuse=fuse: told(fuse, event))
            fuse.scope = Then(lambda stream=stream, group=group: group.start_soon(stream.aclose))  # pyright: ignore
            async for _ in stream:
                pass
        fuse.scope = None
        blown = fuse.blown
        check_whole(session)
        await check_goes_on(runtime, session)
    assert points > 100


def test_asyncios_own_cancellation_at_every_instant(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        points, blown = 0, True
        while blown:
            points += 1
            fuse = Fuse(points)
            runtime = ScriptedRuntime(tokenizer, fuse=fuse).says(*TURNS)
            session = session_with(runtime, fuse, approve=lambda call: True)
            task = asyncio.create_task(session.run("Look.", on_event=lambda event, fuse=fuse: told(fuse, event)))
            fuse.scope = Then(task.cancel)  # pyright: ignore
            await asyncio.wait([task])
            fuse.scope = None
            blown = fuse.blown
            assert session.pending == ()
            check_whole(session)
            await check_goes_on(runtime, session)
        assert points > 100

    asyncio.run(main())


async def test_drop_at_every_event(runtime: ScriptedRuntime) -> None:
    last, done = 0, False
    while not done:
        last += 1
        runtime.replies = list(TURNS)
        session = session_with(runtime, runtime.fuse, approve=lambda call: True)
        stream = session.stream("x")
        for _ in range(last):
            done = isinstance(await anext(stream), m3.Done)
        del stream
        check_whole(session)
        await check_goes_on(runtime, session)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["message", "nothing", "approve", "deny", "some", "json"]),
            st.one_of(st.none(), st.integers(1, 90)),
        ),
        max_size=6,
    )
)
def test_any_pauses_decisions_and_cancellations(
    tokenizer: Tokenizer, anyio_backend: str, steps: list[tuple[str, int | None]]
) -> None:
    async def main() -> None:
        runtime = ScriptedRuntime(tokenizer)
        fuse = runtime.fuse
        session = session_with(runtime, fuse)
        for step, point in steps:
            runtime.replies = [block(call("erase", name="a"), call("count", n="1"), call("erase", name="c")), "end"]
            fuse.at, fuse.count = point, 0
            named = session.pending[:1] if step == "some" else session.pending
            decisions = {call.id: step != "deny" for call in named}
            if step == "json":
                dumped = m3.dump_messages(session.messages)
                other = agent(runtime, *session.tools).session(m3.load_messages(dumped))
                assert (other.messages, other.pending) == (session.messages, session.pending)
                session = other
                continue
            if step != "message" and not session.pending:
                continue

            async def run(
                session: m3.Session = session, step: str = step, decisions: dict[str, bool] = decisions
            ) -> None:
                if step == "message":
                    await session.run("Look.")
                elif step == "nothing":
                    assert (await session.run()).stop == "approval"
                else:
                    await session.run(approve=decisions)

            await cancelled_at(runtime, fuse, run)
        fuse.at = None
        await check_goes_on(runtime, session)

    anyio.run(main, backend=anyio_backend)


def test_a_loop_that_ends_while_tools_run_leaves_nothing(tokenizer: Tokenizer, anyio_backend: str) -> None:
    cleaned: list[bool] = []

    @m3.tool
    async def forever(context: m3.Context) -> None:
        await context.progress(1)
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append(True)

    kept: list[m3.RunStream] = []

    async def main() -> None:
        session = agent(ScriptedRuntime(tokenizer).says(block(call("forever"))), forever).session()
        kept.append(session.stream("x"))
        async for event in kept[0]:
            if isinstance(event, m3.ToolProgress):
                return

    anyio.run(main, backend=anyio_backend)
    assert cleaned == [True]
    kept.clear()  # after its loop
    gc.collect()


async def test_the_log_of_a_paused_and_resumed_run_is_in_order(runtime: ScriptedRuntime) -> None:
    session = session_with(runtime.says(*TURNS), runtime.fuse)
    await session.run("Look.")
    await session.run(approve={"call_4": True})
    await session.run(approve={"call_1": True})
    assert [result.text for result in session.messages[2].results] == ["a", "b", "1", "c"]
    check_log(runtime, session)
