"""`Background`: a task outside every task group and cancel scope of the one that starts it.

Work that goes on while nobody reads its events cannot live inside a reader's `__anext__`: task groups and cancel
scopes must not be left in another task than they were entered in. So it gets a task of its own, which the event loop
holds; the groups and scopes are all inside that task, and it can be cancelled from anywhere.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.lowlevel import current_token

# An event loop keeps weak references to its tasks; one that waits for nothing else would be collected.
_tasks: set[Any] = set()
_inside: contextvars.ContextVar[Background | None] = contextvars.ContextVar("inside", default=None)


class Background:
    """Runs `work()` at once, with the caller's context variables. What it raises is kept in `error`."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self.error: BaseException | None = None
        self._over = anyio.Event()
        self._scope = anyio.CancelScope()
        loop: Any = current_token().native_token
        if hasattr(loop, "create_task"):
            self._schedule = loop.call_soon_threadsafe
            task = loop.create_task(self._run(work))
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)
            task.add_done_callback(lambda _: self._over.set())  # a task cancelled before its first step never runs
        else:
            import trio

            self._schedule = loop.run_sync_soon
            trio.lowlevel.spawn_system_task(self._run, work, context=contextvars.copy_context())

    @property
    def over(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> None:
        """Until the work has ended."""
        await self._over.wait()

    async def end(self) -> None:
        """Cancel the work and wait for its end, even when cancelled meanwhile; the work itself cannot wait for it."""
        self._scope.cancel()
        with anyio.CancelScope(shield=_inside.get() is not self):
            await self._over.wait()

    def cancel(self) -> None:
        """Cancel the work soon. From any thread, also while an object is collected."""
        with contextlib.suppress(RuntimeError):  # its loop has ended, and the task with it
            self._schedule(self._scope.cancel)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        _inside.set(self)
        try:
            with self._scope:
                await work()
        except (Exception, BaseExceptionGroup, KeyboardInterrupt, SystemExit) as error:
            self.error = error  # trio would end the program for what escapes a task like this one
        finally:
            self._over.set()
