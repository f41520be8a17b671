"""An agent as a tool of another one: in a session of its own, or on a fork of the session that calls it."""

from __future__ import annotations

import contextvars
from typing import Annotated, Any

from pydantic import Field

from m3agent.content import Text, ToolResult
from m3agent.errors import ToolError
from m3agent.session import Session
from m3agent.tools import Context, Tool, tool

MAX_DEPTH = 4  # agents inside each other
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)

_TASK = "You are a copy of yourself now, made for this call. Do this, and end with what the call is to give back:\n"
_ELSEWHERE = "being done elsewhere; it is not your concern"


def agent_tool(agent: Any, name: str, description: str, fork: bool, output: Any) -> Tool[..., Any]:
    """See `Agent.as_tool`; `agent` is one."""

    async def run(
        task: Annotated[str, Field(description="what to do, with all that is needed for it")], context: Context
    ) -> str:
        depth = _depth.get()
        if depth >= MAX_DEPTH:
            raise ToolError(f"agents are {MAX_DEPTH} deep inside each other; do this one yourself")
        entered = _depth.set(depth + 1)
        try:
            async with _forked(context, task) if fork else agent.session() as session:
                parts = () if fork else (task,)
                async with session.stream(*parts, output=output, deps=context.deps) as events:
                    try:
                        async for event in events:
                            context.report(event)
                    finally:
                        context.spent.append(events.usage)
        finally:
            _depth.reset(entered)
        reply = events.reply
        if reply.stop != "end":
            raise ToolError(f"it ended early ({reply.stop}), with: {reply.text}")
        return reply.text

    return tool(run, name=name, description=description)


def _forked(context: Context, task: str) -> Session:
    """A session on the caller's pages. Its open calls are answered there: this one with the task."""
    caller: Session | None = context.session
    if caller is None:
        raise ToolError("there is no session to fork")
    session = caller.fork_inside()
    texts = {call.id: _TASK + task if call.id == context.call_id else _ELSEWHERE for call in session.pending}
    session.answer([ToolResult(call_id=call_id, parts=(Text(text=text),)) for call_id, text in texts.items()])
    return session
