"""One call of a tool: whatever happens inside becomes a short answer for the model, except a cancellation."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.to_thread

from m3agent.errors import ToolError
from m3agent.tools.arguments import clip
from m3agent.tools.context import Context
from m3agent.tools.define import Tool
from m3agent.tools.results import ResultPart, result_parts

GRACE = 5.0  # seconds that a cancelled synchronous tool has to return

_log = logging.getLogger("m3agent.tools")


async def call_tool(
    tools: Mapping[str, Tool[..., Any]], name: str, arguments: Mapping[str, Any], context: Context
) -> list[ResultPart]:
    """Run the call. Raises ToolError, with a text for the model, for everything that went wrong inside.

    When cancelled, `context.cancelled` is set; an asynchronous tool has finished its `finally` blocks before this
    returns, a synchronous one is waited for up to `GRACE` seconds, then `context.abandoned` is set and its thread
    goes on.
    """
    tool = tools.get(name)
    if tool is None:
        raise ToolError(f"There is no tool {clip(name, 100)!r}. Tools: {', '.join(tools) or 'none'}.")
    args, kwargs = tool.bind(arguments, context)
    with anyio.CancelScope() as context.scope:
        return await _run(tool, args, kwargs, context)
    raise ToolError("cancelled")


async def _run(tool: Tool[..., Any], args: list[Any], kwargs: dict[str, Any], context: Context) -> list[ResultPart]:
    try:
        if inspect.iscoroutinefunction(inspect.unwrap(tool.function)):
            value = await tool.function(*args, **kwargs)
        else:
            value = await in_thread(lambda: tool.function(*args, **kwargs), context)
            if inspect.isawaitable(value):  # a plain function that hands back a coroutine
                value = await value
        return result_parts(value)
    except ToolError as error:
        raise ToolError(clip(str(error))) from error
    except (Exception, SystemExit) as error:  # a tool made of a script's main function must not end the program
        # The model can often go on; the traceback is for whoever listens to this logger.
        _log.info("tool %s failed", tool.name, exc_info=error)
        raise ToolError(clip(f"{type(error).__name__}: {error}")) from error
    except anyio.get_cancelled_exc_class():
        context.cancel()
        raise


async def in_thread(function: Callable[[], Any], context: Context) -> Any:
    """Call `function` in a thread of its own; cancellation is as for the synchronous tools of `call_tool`."""
    started, finished = threading.Event(), threading.Event()

    def work() -> tuple[Any]:  # in a tuple: trio refuses a coroutine as what a thread's function returns
        started.set()
        try:
            # Set before the thread came to run: the wait below is already over, so nothing may start any more.
            return (None if context.cancelled else function(),)
        finally:
            finished.set()

    try:
        # Of its own: the application's threads, all busy, must not hold up a tool.
        limiter = anyio.CapacityLimiter(1)
        return (await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter))[0]
    except anyio.get_cancelled_exc_class():
        context.cancel()
        if started.is_set():
            with anyio.move_on_after(GRACE, shield=True):
                while not finished.is_set():
                    await anyio.sleep(0.005)
            if not finished.is_set():
                context.abandoned = True
        raise
