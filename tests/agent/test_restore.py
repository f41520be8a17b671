"""A session from its messages alone: the same prompt to the token, the same tools, results still whole."""

from __future__ import annotations

import pytest

import m3agent as m3
from tests.agent.double import ScriptedRuntime, block, call, check_log, read_log
from tests.agent.going_on import agent, check_restores

pytestmark = pytest.mark.anyio


@m3.tool
def write(letters: int, what: str = "y") -> str:
    return what * letters


@m3.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@m3.tool
def late() -> str:
    return "late"


def from_json(runtime: ScriptedRuntime, session: m3.Session, *tools: object) -> m3.Session:
    return agent(runtime, *tools).session(m3.load_messages(m3.dump_messages(session.messages)))


async def test_a_tool_that_came_later_is_not_in_front(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("ok", "ok"), write).session()
    await session.run("x")
    session.add_tool(add)
    await session.run("y")
    log = session.tokens
    again = await check_restores(runtime, session, add, write)
    assert again.tokens[: len(log)] == log
    assert [tool["name"] for tool in session.messages[0].head_tools or ()] == ["write"]
    runtime.says(block(call("add", a="1", b="2")), "3")
    assert (await again.run("1 + 2?")).text == "3"
    check_log(runtime, again)


async def test_a_tool_that_is_gone_stays_gone_until_it_is_added(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("ok", "ok"), write, add).session()
    await session.run("x")
    session.remove_tool("add")
    await session.run("y")
    again = await check_restores(runtime, session, write, add)
    assert [tool.name for tool in again.tools] == ["write"]
    runtime.says(block(call("add", a="1", b="2")), "no")
    await again.run("1 + 2?")
    assert again.messages[-2].results[0].text == "There is no tool 'add'. Tools: write."
    again.add_tool(add)
    runtime.says(block(call("add", a="1", b="2")), "3")
    await again.run("And now?")
    assert again.messages[-2].results[0].text == "3"
    check_log(runtime, again)
    assert [tool.name for tool in (await check_restores(runtime, again, write, add)).tools] == ["write", "add"]


async def test_what_differs_in_the_agents_tools_is_told(runtime: ScriptedRuntime) -> None:
    """One is missing now, one is another one, one is new: the front of the prompt stays, and the model is told."""
    session = agent(runtime.says("ok"), write, add).session()
    await session.run("x")
    log = session.tokens
    other = m3.tool(lambda a: a, name="add", description="Another one.")
    again = from_json(runtime.says("fine"), session, other, late)
    await again.run("y")
    assert again.tokens[: len(log)] == log
    told = read_log(runtime, again.tokens)[4].body
    assert told.startswith(
        "From now on there is no tool write, add any more.\n\nFrom now on there are these tools, too:"
    )
    assert '"Another one."' in told
    assert '"late"' in told
    assert told.endswith("y")
    await check_restores(runtime, again, other, late)
    # With the first tools again it goes the other way.
    third = from_json(runtime.says("fine"), again, write, add)
    assert [tool.name for tool in third.tools] == ["add"]


async def test_a_tool_added_before_the_first_run_of_a_restored_session_is_news(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("ok"), write).session()
    await session.run("x")
    log = session.tokens
    again = from_json(runtime.says("fine"), session, write)
    again.add_tool(late)
    await again.run("y")
    assert again.tokens[: len(log)] == log
    assert '"late"' in read_log(runtime, again.tokens)[4].body


async def test_a_tool_that_came_and_went_unsaid_is_no_news(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("ok", "ok"), write).session()
    await session.run("x")
    session.add_tool(late)
    session.remove_tool("late")
    await session.run("y")
    assert session.messages[2].parts == (m3.Text(text="y"),)


async def test_results_are_whole_after_json(runtime: ScriptedRuntime) -> None:
    """The one that was too long for the context, those that compaction made notes, those of turns that it took out."""
    runtime.context_length = 9000
    session = agent(runtime, write).session()
    runtime.says(block(call("write", letters="20000", what="z"), call("write", letters="7")), "Long.")
    await session.run("x")
    runtime.context_length = 30_000
    for what in "abc":
        runtime.says(block(call("write", letters="2000", what=what)), "ok")
        await session.run("x")
    whole = {1: "z" * 20_000, 2: "y" * 7, 3: "a" * 2000, 4: "b" * 2000, 5: "c" * 2000}

    def check(session: m3.Session) -> None:
        assert {number: session.full_result(f"call_{number}") for number in whole} == whole
        with pytest.raises(KeyError):
            session.full_result("call_6")

    check(from_json(runtime, session, write))
    assert await session.compact(m3.Compaction(keep_turns=1, summarise=False)) is not None
    check(session)
    check(from_json(runtime, session, write))
    runtime.context_length = 4000
    runtime.says("SUMMARY")
    compacted = await session.compact(m3.Compaction(keep_turns=1))
    assert compacted is not None
    assert compacted.turns == 7
    check(session)
    again = from_json(runtime, session, write)
    check(again)
    # Ids go on, so none comes twice.
    runtime.says(block(call("write", letters="1")), "ok")
    await again.run("x")
    assert again.messages[-2].results[0].call_id == "call_6"
    assert again.full_result("call_6") == "y"


async def test_messages_without_their_beginning_take_the_agents_tools(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("one", "two"), write).session()
    await session.run("x")
    session.add_tool(late)
    await session.run("y")
    again = agent(runtime.says("three"), write, late, add).session(session.messages[2:])
    await again.run("z")
    assert [tool["name"] for tool in again.messages[0].head_tools or ()] == ["write", "add"]
    assert [message.text for message in again.messages] == ["y", "two", "z", "three"]
    check_log(runtime, again)
