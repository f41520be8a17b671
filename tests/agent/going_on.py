"""What has to hold after a run was cut: the session goes on, and its log is a conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

import m3agent as m3
from tests.agent.double import Fuse, ScriptedRuntime, block, call, check_log


def agent(runtime: ScriptedRuntime, *tools: Any, **options: Any) -> m3.Agent:
    return m3.Agent(runtime, tools=tools, **options)


GO_ON = (block(call("count", n="7")), "Still here.")


async def cancelled_at(runtime: ScriptedRuntime, fuse: Fuse, run: Callable[[], Awaitable[Any]]) -> bool:
    with anyio.CancelScope() as scope:
        fuse.scope = scope
        await run()
    fuse.scope = None
    return fuse.blown


async def check_goes_on(runtime: ScriptedRuntime, session: m3.Session) -> None:
    tokens, messages = session.tokens, session.messages
    if session.pending and messages[-1].role == "tool":
        messages.pop()  # gets the missing results
    runtime.replies.clear()
    runtime.says(*GO_ON)
    reply = await session.run("And now?")
    assert reply.text == "Still here."
    assert session.tokens[: len(tokens)] == tokens
    assert session.messages[: len(messages)] == messages
    check_log(runtime, session)
    assert m3.load_messages(m3.dump_messages(session.messages)) == session.messages


async def check_restores(runtime: ScriptedRuntime, session: m3.Session, *tools: Any) -> m3.Session:
    """From its messages as JSON the same session comes about: its next prompt is the same, to the token."""
    again = agent(runtime, *tools).session(m3.load_messages(m3.dump_messages(session.messages)))
    assert again.messages == session.messages
    assert again.pending == session.pending
    runtime.replies.clear()
    runtime.says("Here.", "Here.")
    fork = session.fork()
    await fork.run("Are you there?")
    await again.run("Are you there?")
    assert again.tokens == fork.tokens
    assert again.messages == fork.messages
    return again
