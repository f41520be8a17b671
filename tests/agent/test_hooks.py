"""Hooks around turns and calls."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import pytest

import m3agent as m3
from tests.agent.double import ScriptedRuntime, block, call, check_log
from tests.agent.going_on import agent, check_goes_on

pytestmark = pytest.mark.anyio


@m3.tool
async def add(a: int, b: int = 1) -> int:
    if a == 13:
        raise m3.ToolError("not that number")
    return a + b


ONE_CALL = block(call("add", a="1"))


async def test_hooks_are_called_around_turns_and_calls(runtime: ScriptedRuntime) -> None:
    seen: list[Any] = []

    async def before_model(session: m3.Session) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(("before model", [message.role for message in session.messages]))

    def after_model(session: m3.Session, message: m3.Message, usage: m3.Usage) -> None:
        assert session.messages[-1] == message
        seen.append(("after model", message.text, usage.output_tokens > 0))

    def before_tool(call: m3.ToolCall, context: m3.Context) -> None:
        seen.append(("before tool", call.arguments, context.tool))

    async def after_tool(call: m3.ToolCall, result: m3.ToolResult, context: m3.Context) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(("after tool", call.id, result.text))

    hooks = m3.Hooks(before_model=before_model, after_model=after_model, before_tool=before_tool, after_tool=after_tool)
    session = agent(runtime.says("Hm." + ONE_CALL, "2"), add, hooks=hooks).session()
    assert (await session.run("x")).text == "2"
    assert seen == [
        ("before model", ["user"]),
        ("after model", "Hm.", True),
        ("before tool", {"a": 1}, "add"),
        ("after tool", "call_1", "2"),
        ("before model", ["user", "assistant", "tool"]),
        ("after model", "2", True),
    ]


@pytest.mark.parametrize(
    ("change", "expected", "error"),
    [
        (lambda call: None, "2", False),
        (lambda call: call.model_copy(update={"arguments": {"a": 5, "b": 5}}), "10", False),
        (lambda call: call.model_copy(update={"arguments": {"a": "x"}}), "a: Input should be a valid integer", True),
        (lambda call: {"cached": True}, '{"cached": true}', False),
        (lambda call: m3.ToolResult(call_id="", parts=(m3.Text(text="no"),), error=True), "no", True),
    ],
)
async def test_before_tool_changes_a_call_or_answers_it(
    runtime: ScriptedRuntime, change: Any, expected: str, error: bool
) -> None:
    hooks = m3.Hooks(before_tool=lambda call, context: change(call))
    session = agent(runtime.says(ONE_CALL, "ok"), add, hooks=hooks).session()
    await session.run("x")
    (result,) = session.messages[2].results
    assert expected in result.text
    assert (result.error, result.call_id) == (error, "call_1")
    assert session.messages[1].calls[0].arguments == {"a": 1}  # what the model said stays
    check_log(runtime, session)


async def test_before_tool_refuses_with_a_text(runtime: ScriptedRuntime) -> None:
    def before_tool(call: m3.ToolCall, context: m3.Context) -> None:
        raise m3.ToolError("not on Sundays")

    session = agent(runtime.says(ONE_CALL, "ok"), add, hooks=m3.Hooks(before_tool=before_tool)).session()
    assert (await session.run("x")).text == "ok"
    (result,) = session.messages[2].results
    assert (result.text, result.error) == ("not on Sundays", True)


async def test_after_tool_sees_errors_and_replaces_results(runtime: ScriptedRuntime) -> None:
    def after_tool(call: m3.ToolCall, result: m3.ToolResult, context: m3.Context) -> Any:
        return f"{result.text}!" if result.error else None

    calls = block(call("add", a="13"), call("add", a="2"))
    session = agent(runtime.says(calls, "ok"), add, hooks=m3.Hooks(after_tool=after_tool)).session()
    await session.run("x")
    assert [result.text for result in session.messages[2].results] == ["not that number!", "3"]


@pytest.mark.parametrize("where", ["before_model", "after_model", "before_tool", "after_tool"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_a_hook_raises_ends_the_run(runtime: ScriptedRuntime, where: str, asynchronous: bool) -> None:
    def plain(*arguments: Any) -> None:
        raise PermissionError("enough")

    async def later(*arguments: Any) -> None:
        await anyio.lowlevel.checkpoint()
        raise PermissionError("enough")

    # Off for going on: the hooks are the agent's, so they are switched by a list.
    broken = [True]

    async def hook(*arguments: Any) -> None:
        if broken:
            await later() if asynchronous else plain()

    session = agent(runtime.says(ONE_CALL, "ok"), add, hooks=m3.Hooks(**{where: hook})).session()
    with pytest.raises(PermissionError, match="enough"):
        await session.run("x")
    assert session.messages[0].text == "x"
    broken.clear()
    await check_goes_on(runtime, session)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (False, TypeError),
        (True, TypeError),
        (m3.ToolCall(id="call_1", name="other"), ValueError),
        (m3.ToolCall(id="x", name="add"), ValueError),
    ],
)
async def test_answers_of_a_hook_that_mean_nothing(runtime: ScriptedRuntime, answer: Any, raised: Any) -> None:
    hooks = m3.Hooks(before_tool=lambda call, context: answer)
    session = agent(runtime.says(ONE_CALL, "ok"), add, hooks=hooks).session()
    with pytest.raises(raised, match="before_tool"):
        await session.run("x")
    assert session.messages[-1].results[0].text == "cancelled"
