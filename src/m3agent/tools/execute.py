"""One call of a tool: whatever happens inside becomes a short answer for the model, but for cancellation and Ctrl-C."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, closing
from typing import Any, cast

import anyio
import anyio.to_thread

from m3agent.errors import ToolError
from m3agent.tools.arguments import clip
from m3agent.tools.context import Context
from m3agent.tools.define import Tool
from m3agent.tools.results import ResultPart, result_parts
from m3agent.tools.signature import body_of

GRACE = 5.0  # seconds that a cancelled synchronous tool has to return
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds before another try; doubled each time

_log = logging.getLogger("m3agent.tools")


async def call_tool(
    tools: Mapping[str, Tool[..., Any]], name: str, arguments: Mapping[str, Any], context: Context
) -> list[ResultPart]:
    """Run the call. Raises ToolError, with a text for the model, for everything that went wrong inside.

    When cancelled, or when its time is over, `context.cancelled` is set; an asynchronous tool has finished its
    `finally` blocks before this returns, a synchronous one is waited for up to `GRACE` seconds, then
    `context.abandoned` is set and its thread goes on. An asynchronous tool that shields itself, or swallows every
    cancellation, is waited for, and what it returns after its time does not count.

    KeyboardInterrupt, and exceptions of the program's own that are no `Exception`, are raised as they are.
    """
    tool = tools.get(name)
    if tool is None:
        raise ToolError(f"There is no tool {clip(name, 100)!r}. Tools: {', '.join(tools) or 'none'}.")
    args, kwargs = tool.bind(arguments, context)
    parts: list[ResultPart] = []
    try:
        with anyio.CancelScope() as context.scope, anyio.move_on_after(tool.timeout) as limit:
            parts = await _run(tool, args, kwargs, context)
    except ToolError as error:
        raise ToolError(clip(str(error))) from error
    except (Exception, SystemExit) as error:  # a tool made of a script's main function must not end the program
        # The model can often go on; the traceback is for whoever listens to this logger.
        _log.info("tool %s failed", tool.name, exc_info=error)
        raise ToolError(clip(_reason(error))) from error
    if context.scope.cancel_called:
        raise ToolError("cancelled")
    if limit.cancel_called:
        left = f"; it did not stop within {GRACE:.0f} s and was left running" if context.abandoned else ""
        raise ToolError(f"timed out after {tool.timeout:g} s{left}")
    return parts


async def _run(tool: Tool[..., Any], args: list[Any], kwargs: dict[str, Any], context: Context) -> list[ResultPart]:
    try:
        return result_parts(await _attempts(tool, args, kwargs, context))
    except (anyio.get_cancelled_exc_class(), asyncio.CancelledError) as error:
        if not _is_cancelled():
            # Of something inside that was cancelled, and waited for; nobody cancelled the call.
            raise RuntimeError(f"the tool raised {type(error).__name__}") from error
        context.cancel()
        raise
    except GeneratorExit as error:
        raise RuntimeError("the tool raised GeneratorExit") from error


def _is_cancelled() -> bool:
    """Whether the task in which this runs is being cancelled, by a cancel scope or by asyncio itself."""
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio
        return False
    return task is not None and task.cancelling() > 0


async def _attempts(tool: Tool[..., Any], args: list[Any], kwargs: dict[str, Any], context: Context) -> Any:
    for attempt in range(tool.retries):
        try:
            return await _once(tool, args, kwargs, context)
        except tool.retry_on as error:
            _log.info("tool %s is tried again", tool.name, exc_info=error)
        await anyio.sleep(min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE))
    return await _once(tool, args, kwargs, context)


async def _once(tool: Tool[..., Any], args: list[Any], kwargs: dict[str, Any], context: Context) -> Any:
    # What a decorator wraps does not count: one that makes an asynchronous function synchronous needs a thread.
    function = body_of(tool.function, unwrap=False)

    def call() -> Any:
        value = tool.function(*args, **kwargs)
        return _last(value, context) if inspect.isgenerator(value) else value

    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        value: Any = tool.function(*args, **kwargs)
    else:
        value = await in_thread(call, context)
    if inspect.isasyncgen(value):
        return await _last_of(cast("AsyncGenerator[Any]", value), context)
    return await value if inspect.isawaitable(value) else value


async def _last_of(values: AsyncGenerator[Any], context: Context) -> Any:
    """The last of an async generator's values; all of them are progress."""
    value = None
    async with aclosing(values):
        async for value in values:
            context.report(value)
    return value


def _last(values: Generator[Any, Any, Any], context: Context) -> Any:
    """As `_last_of`, of a plain generator; what it returns, if anything, is the result."""
    value = None
    with closing(values):
        while not context.cancelled:
            try:
                value = next(values)
            except StopIteration as end:
                return value if end.value is None else end.value
            context.report(value)
    return value


def _reason(error: BaseException) -> str:
    """What went wrong, in a line. Of a group, the exceptions in it: the group itself only counts them."""
    if isinstance(error, BaseExceptionGroup):
        inside = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return "; ".join(_reason(part) for part in inside[:3])
    return f"{type(error).__name__}: {error}"


async def in_thread(function: Callable[[], Any], context: Context) -> Any:
    """Call `function` in a thread of its own; cancellation is as for the synchronous tools of `call_tool`."""
    started, finished = threading.Event(), threading.Event()

    def work() -> tuple[Any]:  # in a tuple: trio refuses a coroutine as what a thread's function returns
        started.set()
        try:
            # Set before the thread came to run: the wait below is already over, so nothing may start any more.
            return (None if context.cancelled else function(),)
        except (StopIteration, GeneratorExit, asyncio.CancelledError) as error:  # they would end the one who waits
            raise RuntimeError(f"the tool raised {type(error).__name__}") from error
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
