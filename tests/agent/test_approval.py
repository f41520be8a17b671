"""Approvals: who is asked about what, pauses and how they go on, also elsewhere."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import m3agent as m3
from tests.agent.double import NS, ScriptedRuntime, block, call, check_log
from tests.agent.going_on import agent, check_goes_on

pytestmark = pytest.mark.anyio


class Shop:
    def __init__(self) -> None:
        self.ran: list[str] = []

        @m3.tool(needs_approval=True)
        async def delete(path: str) -> str:
            self.ran.append(path)
            return f"deleted {path}"

        @m3.tool
        async def look(name: str) -> str:
            self.ran.append(name)
            return f"saw {name}"

        self.delete = delete
        self.look = look

    def session(self, runtime: ScriptedRuntime, **options: Any) -> m3.Session:
        return agent(runtime, self.delete, self.look, **options).session()


THREE = block(call("delete", path="a"), call("look", name="b"), call("delete", path="c"))


def results(session: m3.Session) -> list[str]:
    message = next(message for message in reversed(session.messages) if message.role == "tool")
    return [result.text for result in message.results]


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def test_a_run_pauses_and_goes_on_with_decisions(runtime: ScriptedRuntime, shop: Shop) -> None:
    session = shop.session(runtime.says("Hm." + THREE, "Done."))
    async with session.stream("x") as stream:
        events = [event async for event in stream]
    assert isinstance(events[-2], m3.ApprovalNeeded)
    assert events[-2].calls == session.pending
    assert [call.arguments["path"] for call in session.pending] == ["a", "c"]
    assert (stream.reply.stop, stream.reply.text, shop.ran) == ("approval", "Hm.", ["b"])
    assert results(session) == ["saw b"]
    reply = await session.run(approve={"call_1": True, "call_3": "the file is needed"})
    assert (reply.stop, reply.text, shop.ran) == ("end", "Done.", ["b", "a"])
    assert results(session) == ["deleted a", "saw b", "not approved: the file is needed"]
    assert [result.error for result in session.messages[2].results] == [False, False, True]
    assert [message.role for message in reply.messages] == ["tool", "assistant"]
    assert session.pending == ()
    body = check_log(runtime, session)[-2].body
    assert body.index("deleted a") < body.index("saw b") < body.index("not approved: the file is needed")


async def test_calls_that_are_not_named_stay_pending(runtime: ScriptedRuntime, shop: Shop) -> None:
    session = shop.session(runtime.says(THREE, "Done."))
    await session.run("x")
    for _ in range(2):
        assert (await session.run()).stop == "approval"
    reply = await session.run(approve={"call_3": True})
    assert (reply.stop, [call.id for call in session.pending], shop.ran) == ("approval", ["call_1"], ["b", "c"])
    assert results(session) == ["saw b", "deleted c"]
    reply = await session.run(approve={"call_1": False})
    assert (reply.stop, results(session)) == ("end", ["not approved", "saw b", "deleted c"])
    check_log(runtime, session)


async def test_a_paused_session_goes_on_from_json(runtime: ScriptedRuntime, shop: Shop) -> None:
    session = shop.session(runtime.says(THREE))
    await session.run("x")
    saved = m3.dump_messages(session.messages)
    for approve in ({"call_1": True, "call_3": True}, {"call_1": False, "call_3": True}):
        elsewhere = Shop()
        other = ScriptedRuntime(runtime.tokenizer)
        again = agent(other.says("Done."), elsewhere.delete, elsewhere.look).session(m3.load_messages(saved))
        assert again.pending == session.pending
        assert (await again.run(approve=approve)).text == "Done."
        assert sorted(elsewhere.ran) == (["a", "c"] if approve["call_1"] else ["c"])
        assert results(again)[1:] == ["saw b", "deleted c"]
        check_log(other, again)


async def test_a_message_refuses_what_is_pending(runtime: ScriptedRuntime, shop: Shop) -> None:
    session = shop.session(runtime.says(THREE, "I see."))
    await session.run("x")
    async with session.stream("Leave the files.") as stream:
        refused = [event.result async for event in stream if isinstance(event, m3.ToolResultEvent)]
    assert [(result.call_id, result.text) for result in refused] == [
        ("call_1", "not approved"),
        ("call_3", "not approved"),
    ]
    assert shop.ran == ["b"]
    assert results(session) == ["not approved", "saw b", "not approved"]
    assert session.messages[3].text == "Leave the files."
    check_log(runtime, session)


async def test_a_message_with_decisions(runtime: ScriptedRuntime, shop: Shop) -> None:
    session = shop.session(runtime.says(THREE, "I see."))
    await session.run("x")
    assert (await session.run("Only this one.", approve={"call_3": True})).text == "I see."
    assert results(session) == ["not approved", "saw b", "deleted c"]
    assert [message.role for message in session.messages] == ["user", "assistant", "tool", "user", "assistant"]
    check_log(runtime, session)


@pytest.mark.parametrize("kind", ["plain", "async", "with context"])
async def test_a_callback_decides_at_once(runtime: ScriptedRuntime, shop: Shop, kind: str) -> None:
    asked: list[Any] = []
    main = threading.get_ident()

    def plain(call: m3.ToolCall) -> bool | str:
        asked.append((call.id, threading.get_ident() == main))
        return call.arguments["path"] == "a" or "not that one"

    async def asynchronous(call: m3.ToolCall) -> bool | str:
        await anyio.lowlevel.checkpoint()
        return plain(call)

    def with_context(call: m3.ToolCall, context: m3.Context) -> bool | str:
        assert (context.deps, context.call_id) == ("deps", call.id)
        return plain(call)

    approve = {"plain": plain, "async": asynchronous, "with context": with_context}[kind]
    session = shop.session(runtime.says(THREE, "Done."), approve=approve)
    assert (await session.run("x", deps="deps")).stop == "end"
    assert asked == [("call_1", kind == "async"), ("call_3", kind == "async")]
    assert results(session) == ["deleted a", "saw b", "not approved: not that one"]


async def test_a_callback_of_the_run_and_one_question_at_a_time(runtime: ScriptedRuntime, shop: Shop) -> None:
    open_questions: list[str] = []

    async def approve(call: m3.ToolCall) -> bool:
        open_questions.append(call.id)
        assert len(open_questions) == 1
        await anyio.sleep(0.002)
        open_questions.pop()
        return True

    session = shop.session(runtime.says(THREE, "Done."))
    assert (await session.run("x", approve=approve)).stop == "end"
    assert sorted(shop.ran) == ["a", "b", "c"]


async def test_a_callback_decides_about_pending_calls_too(runtime: ScriptedRuntime, shop: Shop) -> None:
    session = shop.session(runtime.says(THREE, "Done."))
    await session.run("x")
    assert (await session.run(approve=lambda call: True)).stop == "end"
    assert sorted(shop.ran) == ["a", "b", "c"]


async def test_the_agents_callback_is_asked_about_later_calls(runtime: ScriptedRuntime, shop: Shop) -> None:
    paused = shop.session(runtime.says(block(call("delete", path="a"))))
    await paused.run("x")
    session = agent(runtime, shop.delete, shop.look, approve=lambda call: True).session(paused.messages)
    runtime.says(block(call("delete", path="b")), "Done.")
    assert (await session.run(approve={"call_1": False})).text == "Done."
    assert shop.ran == ["b"]


async def test_a_predicate_on_the_typed_arguments(runtime: ScriptedRuntime) -> None:
    seen: list[Any] = []

    async def large(sizes: list[int], where: str = "here") -> bool:
        await anyio.lowlevel.checkpoint()
        seen.append(sizes)
        return sum(sizes) > 10

    @m3.tool(needs_approval=large)
    def allocate(sizes: list[int], where: str = "here") -> int:
        return sum(sizes)

    def calls(*sizes: int) -> str:
        return block(*[call("allocate", sizes=f"{NS}<item>{size}{NS}</item>") for size in sizes])

    session = agent(runtime.says(calls(3, 30)), allocate).session()
    assert (await session.run("x")).stop == "approval"
    assert seen == [[3], [30]]
    assert [call.arguments for call in session.pending] == [{"sizes": [30]}]
    assert results(session) == ["3"]


async def test_nobody_is_asked_about_calls_that_cannot_run(runtime: ScriptedRuntime, shop: Shop) -> None:
    def approve(call: m3.ToolCall) -> bool:
        raise AssertionError(call)

    wrong = [call("delete"), call("delete", path="a", x="1"), call("nothing"), call("delete", path="x")[:-20]]
    session = shop.session(runtime.says(block(*wrong), "Sorry."), approve=approve)
    assert (await session.run("x")).stop == "end"
    assert all(result.error for result in session.messages[2].results)
    assert not shop.ran


@pytest.mark.parametrize("answer", [None, 1, "raises"])
async def test_a_callback_that_gives_no_answer_ends_the_run(runtime: ScriptedRuntime, shop: Shop, answer: Any) -> None:
    def approve(call: m3.ToolCall) -> Any:
        if answer == "raises":
            raise ZeroDivisionError
        return answer

    session = shop.session(runtime.says(THREE), approve=approve)
    with pytest.raises(ZeroDivisionError if answer == "raises" else TypeError):
        await session.run("x")
    assert "a" not in shop.ran
    assert session.pending == ()
    await check_goes_on(runtime, session)


async def test_decisions_that_fit_nothing_are_refused_before_anything_happens(
    runtime: ScriptedRuntime, shop: Shop
) -> None:
    session = shop.session(runtime.says(THREE))
    with pytest.raises(ValueError, match="waiting: none"):
        await session.run("x", approve={"call_1": True})
    await session.run("x")
    before = session.messages
    with pytest.raises(ValueError, match="no call 'call_2' waits for approval; waiting: call_1, call_3"):
        await session.run(approve={"call_1": True, "call_2": True})
    with pytest.raises(TypeError, match="True, False or a reason"):
        await session.run(approve={"call_1": None})  # pyright: ignore
    assert session.messages == before
    assert len(session.pending) == 2
    assert shop.ran == ["b"]
    with pytest.raises(TypeError, match="approve is a function"):
        agent(runtime, approve={"call_1": True})


async def test_a_fork_of_a_paused_session_decides_by_itself(runtime: ScriptedRuntime, shop: Shop) -> None:
    session = shop.session(runtime.says(THREE))
    await session.run("x")
    other = session.fork()
    runtime.says("One.", "Two.")
    await session.run(approve={"call_1": True, "call_3": True})
    assert len(other.pending) == 2
    await other.run(approve={"call_1": False, "call_3": False})
    assert results(session) == ["deleted a", "saw b", "deleted c"]
    assert results(other) == ["not approved", "saw b", "not approved"]
    check_log(runtime, session)
    check_log(runtime, other)


async def test_results_that_waited_leave_less_room_for_later_ones(runtime: ScriptedRuntime) -> None:
    @m3.tool
    def write(letters: int) -> str:
        return "y" * letters

    runtime.context_length = 9000
    free, asked = write, m3.tool(write.function, name="ask", needs_approval=True)
    calls = block(call("ask", letters="4000"), call("write", letters="4000"), call("ask", letters="1000"))
    session = agent(runtime.says(calls, "ok"), free, asked).session()
    await session.run("x")
    assert (await session.run(approve={"call_1": True, "call_3": True})).text == "ok"
    first, second, third = (result.text for result in session.messages[2].results)
    assert "of 4000 characters left out" in first
    assert (second, third) == ("y" * 4000, "y" * 1000)
    check_log(runtime, session)
