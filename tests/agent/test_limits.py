"""Limits on time and cost: a run that reaches one ends without an error, and the session goes on."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import m3agent as m3
from tests.agent.double import ScriptedRuntime, block, call, check_log
from tests.agent.going_on import agent, check_goes_on

pytestmark = pytest.mark.anyio

PRICE = m3.Price(prompt=2.0, cached=0.5, output=10.0)


@m3.tool
async def count(n: int) -> int:
    return n


async def test_time_ends_a_run_in_its_tools(runtime: ScriptedRuntime) -> None:
    cleaned: list[bool] = []

    @m3.tool
    async def forever() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append(True)

    calls = block(call("forever"), call("count", n="1"))
    session = agent(runtime.says("Hm." + calls), forever, count).session()
    async with session.stream("x", max_seconds=0.3) as stream:
        events = [event async for event in stream]
    reply = stream.reply
    assert events[-1] == m3.Done(reply)
    assert (reply.stop, reply.text, cleaned) == ("seconds", "Hm.", [True])
    assert [r.text for r in session.messages[-1].results] == ["cancelled: the time limit of the run was reached", "1"]
    assert reply.usage.tool_seconds > 0.1
    assert [message.role for message in reply.messages] == ["user", "assistant", "tool"]
    await check_goes_on(runtime, session)


async def test_time_ends_a_run_in_the_middle_of_a_turn(runtime: ScriptedRuntime) -> None:
    real = runtime.fuse.point

    async def point() -> None:
        if runtime.fuse.count == 40:
            await anyio.sleep_forever()
        await real()

    for seconds in (0.2, 1, 5, 25):  # enough for what comes before, however busy the machine is
        runtime.fuse.count, runtime.replies[:] = 0, ["some text" + block(call("count", n="1"))]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runtime.fuse, "point", point)
            session = agent(runtime, count).session()
            async with session.stream("x", max_seconds=seconds) as stream:
                events = [event async for event in stream]
        if runtime.fuse.count == 40:
            break
    assert (stream.reply.stop, stream.reply.text) == ("seconds", "some text")
    assert stream.reply.usage.output_tokens > 10
    assert isinstance(events[-1], m3.Done)
    assert any(isinstance(event, m3.TurnFinished) for event in events)
    assert session.pending == ()
    await check_goes_on(runtime, session)


async def test_time_that_is_over_before_anything_was_sent(
    runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from m3agent.history import History

    async def send(self: History, message: Any) -> None:
        await anyio.sleep_forever()

    session = agent(runtime, count).session()
    with monkeypatch.context() as patched:
        patched.setattr(History, "send", send)
        reply = await session.run("x", max_seconds=0.05)
    assert (reply.stop, reply.text, reply.messages, session.messages) == ("seconds", "", (), [])
    await check_goes_on(runtime, session)


async def test_time_runs_while_nobody_reads(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("a long text"), count).session()
    async with session.stream("x", max_seconds=0.05) as stream:
        await anext(stream)
        await anyio.sleep(0.06)
        rest = [event async for event in stream]
    assert isinstance(rest[-1], m3.Done)
    assert rest[-1].reply.stop == "seconds"
    assert len(rest[-1].reply.text) < len("a long text")


async def test_a_cancellation_is_no_time_limit(runtime: ScriptedRuntime) -> None:
    @m3.tool
    async def forever() -> None:
        await anyio.sleep_forever()

    session = agent(runtime.says(block(call("forever"))), forever, count).session()
    with anyio.move_on_after(0.05) as scope:
        await session.run("x", max_seconds=100)
    assert scope.cancelled_caught
    assert session.messages[-1].results[0].text == "cancelled"
    await check_goes_on(runtime, session)


async def test_cost_is_counted_and_ends_a_run(runtime: ScriptedRuntime) -> None:
    runtime.says(*[block(call("count", n="1"))] * 20)
    session = agent(runtime, count, price=PRICE).session()
    reply = await session.run("x", max_turns=2)
    usage = reply.usage
    fresh = usage.prompt_tokens - usage.reused_tokens
    expected = (fresh * 2.0 + usage.reused_tokens * 0.5 + usage.output_tokens * 10.0) / 1e6
    assert reply.cost == pytest.approx(expected)
    assert reply.stop == "turns"
    reply = await session.run("y", max_cost=expected * 2)
    assert reply.stop == "cost"
    assert reply.cost is not None
    assert reply.cost >= expected
    check_log(runtime, session)
    await check_goes_on(runtime, session)


async def test_cost_ends_a_turn_that_gets_too_long(runtime: ScriptedRuntime) -> None:
    dear = m3.Price(prompt=0, cached=0, output=1_000_000)
    session = agent(runtime.says("a long text that costs" + "…"), price=dear).session()
    reply = await session.run("x", max_cost=10, max_tokens=15)
    assert (reply.stop, reply.cost) == ("cost", 10)
    runtime.replies[:] = ["a long text that costs…"]
    reply = await session.run("x", max_cost=10, max_tokens=5)
    assert (reply.stop, reply.cost) == ("tokens", 5)


async def test_without_a_price_there_is_no_cost(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("ok")).session()
    with pytest.raises(ValueError, match="price="):
        session.stream("x", max_cost=1.0)
    assert (await session.run("x")).cost is None


@pytest.mark.parametrize("limit", ["max_turns", "max_tokens", "max_seconds", "max_cost"])
@pytest.mark.parametrize("value", [0, -1])
async def test_limits_that_leave_nothing_are_refused(runtime: ScriptedRuntime, limit: Any, value: int) -> None:
    session = agent(runtime, price=PRICE).session()
    with pytest.raises(ValueError, match=limit):
        await session.run("x", **{limit: value})


def test_a_price_is_not_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        m3.Price(prompt=1, cached=1, output=-1)
