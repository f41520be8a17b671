"""Approvals: which calls need one, and how the program gives it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import anyio
import anyio.to_thread

from m3agent.content import ToolCall
from m3agent.errors import ToolError
from m3agent.hooks import called
from m3agent.tools import Context, Tool

NOT_APPROVED = "not approved"

Decision: TypeAlias = bool | str
"""True: the call may run. False, or a reason that the model is told: it may not."""

Approve: TypeAlias = (
    Callable[[ToolCall], Decision | Awaitable[Decision]] | Callable[[ToolCall, Context], Decision | Awaitable[Decision]]
)
"""Asked for one call at a time, in call order; a plain function runs in a thread, so it may wait for a person."""


async def needs_approval(tool: Tool[..., Any] | None, call: ToolCall) -> bool:
    """Whether to ask. Raises ToolError, with a text for the model, for arguments that do not fit: nobody is asked."""
    if tool is None or tool.needs_approval is False:
        return False
    values, predicate = tool.validate(call.arguments), tool.needs_approval
    return predicate is True or bool(await called(lambda: predicate(**values)))


async def ask(approve: Approve, call: ToolCall, context: Context) -> Decision:
    """The callback's decision. Raises TypeError for an answer that is none."""
    arguments = (call, context) if _takes_context(approve) else (call,)
    function: Callable[..., Any] = approve
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        value = await function(*arguments)
    else:
        limiter = anyio.CapacityLimiter(1)  # of its own: it may wait for long
        # In a tuple: trio refuses a coroutine as what a thread's function returns.
        (value,) = await anyio.to_thread.run_sync(
            lambda: (function(*arguments),), abandon_on_cancel=True, limiter=limiter
        )
        if inspect.isawaitable(value):
            value = await value
    return checked(value)


def checked(decision: object) -> Decision:
    """Raises TypeError for anything but True, False or a reason: a forgotten `return` must not decide anything."""
    if not isinstance(decision, bool | str):
        raise TypeError(f"an approval is True, False or a reason against the call, not {decision!r}")
    return decision


def checked_decisions(decisions: Mapping[str, Decision], pending: Iterable[ToolCall]) -> dict[str, Decision]:
    """Raises ValueError for the id of a call that does not wait for approval, TypeError for what is no decision."""
    waiting = [call.id for call in pending]
    for call_id in decisions:
        if call_id not in waiting:
            raise ValueError(f"no call {call_id!r} waits for approval; waiting: {', '.join(waiting) or 'none'}")
    return {call_id: checked(decision) for call_id, decision in decisions.items()}


def refuse(decision: Decision) -> None:
    """Raises ToolError unless the decision is True."""
    if decision is not True:
        raise ToolError(f"{NOT_APPROVED}: {decision}" if decision else NOT_APPROVED)


def _takes_context(approve: Approve) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(approve).parameters.values()
    return len([p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]) >= 2
