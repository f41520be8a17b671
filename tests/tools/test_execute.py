"""Running one call: in a thread where it must be, with everything that goes wrong as a text."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest

import m3agent as m3
from m3agent.tools.execute import call_tool

pytestmark = pytest.mark.anyio
WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("WHERE")


async def run(tool: m3.Tool[..., Any], **arguments: Any) -> Any:
    return await call_tool({tool.name: tool}, tool.name, arguments, m3.Context(tool.name, "call_1"))


async def test_loop_01_synchronous_tools_run_in_a_thread_with_the_context_variables() -> None:
    WHERE.set("here")
    threads: list[int] = []

    @m3.tool
    def f() -> str:
        threads.append(threading.get_ident())
        return WHERE.get()

    assert await run(f) == ["here"]
    assert threads[0] != threading.get_ident()


async def test_asynchronous_tools_run_in_the_loop() -> None:
    @m3.tool
    async def f(n: int) -> int:
        await anyio.sleep(0)
        return threading.get_ident() * n

    assert await run(f, n=1) == [str(threading.get_ident())]


async def test_wrapped_functions_keep_their_signature_and_kind() -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs)

        return wrapper

    def plain(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    async def f(n: int) -> int:
        return n + 1

    for decorate in (logged, plain, lambda function: plain(logged(function))):
        assert await run(m3.tool(decorate(f)), n=1) == ["2"]


async def test_a_plain_function_may_hand_back_a_coroutine() -> None:
    async def later(n: int) -> int:
        return n

    assert await run(m3.tool(lambda: later(5), name="f")) == ["5"]


async def test_a_busy_thread_pool_does_not_hold_up_tools() -> None:
    limiter = anyio.to_thread.current_default_thread_limiter()
    before = limiter.total_tokens
    limiter.total_tokens = 1
    release = threading.Event()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, release.wait)
            await anyio.sleep(0.01)
            with anyio.fail_after(5):
                assert await run(m3.tool(lambda: "ok", name="f")) == ["ok"]
            release.set()
    finally:
        release.set()
        limiter.total_tokens = before


async def test_a_tool_cancelled_before_its_thread_began_never_runs() -> None:
    ran: list[int] = []
    tool = m3.tool(lambda: ran.append(1), name="f")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run(tool)
    await anyio.sleep(0.02)
    assert ran == []


async def test_the_same_tool_is_still_a_function() -> None:
    @m3.tool
    def double(n: int) -> int:
        """Twice n."""
        return 2 * n

    assert double(4) == 8
    assert repr(double) == (
        "Tool(name='double', description='Twice n.', parameters={'type': 'object', "
        "'properties': {'n': {'type': 'integer'}}, 'required': ['n']})"
    )
