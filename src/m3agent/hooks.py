"""`Hooks`: functions of the program that are called around the model's turns and around the calls of tools."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m3agent.content import Content, Message, ToolCall, ToolResult, content_parts
from m3agent.tools import Context
from m3agent.tools.results import result_parts

if TYPE_CHECKING:
    from m3agent.runtime.usage import Usage


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Each is a function or an async one; a plain one runs on the event loop, so it should not wait.

    before_model(session): before each turn; the session's messages hold all that the model will see.
    after_model(session, message, usage): after each turn, before its calls run.
    before_tool(call, context): before an approved call runs. It returns None, or a call with other arguments, which
        are validated again, or a result to use instead, as a tool would return it. ToolError refuses the call with
        that text for the model.
    after_tool(call, result, context): after the call, errors included. It returns None or another result.

    Whatever else a hook raises ends the run and reaches the caller; the session can go on.
    """

    before_model: Callable[[Any], Awaitable[None] | None] | None = None
    after_model: Callable[[Any, Message, Usage], Awaitable[None] | None] | None = None
    before_tool: Callable[[ToolCall, Context], Any] | None = None
    after_tool: Callable[[ToolCall, ToolResult, Context], Any] | None = None


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a plain or an async function returns."""
    value = function(*arguments)
    return await value if inspect.isawaitable(value) else value


def result_of(call: ToolCall, value: Any, hook: str) -> ToolResult:
    """A hook's value as the result of `call`. Raises TypeError for True and False, which say neither yes nor no."""
    if isinstance(value, bool):
        raise TypeError(f"{hook} returned {value}; return None to go on, or raise m3agent.ToolError to refuse")
    if isinstance(value, ToolResult):
        return value.model_copy(update={"call_id": call.id})
    parts: list[Content] = list(result_parts(value))
    return ToolResult(call_id=call.id, parts=content_parts(parts))


def changed_call(call: ToolCall, other: ToolCall) -> ToolCall:
    """The call with another one's arguments. Raises ValueError when that is a call of another tool."""
    if (other.id, other.name) != (call.id, call.name):
        raise ValueError(f"before_tool may change a call's arguments alone, not {call.name!r} into {other.name!r}")
    return call.model_copy(update={"arguments": other.arguments})
