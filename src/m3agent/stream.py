"""`RunStream`: one run of a session, pulled event by event.

Each `__anext__` goes one step of the run's `TurnLoop`. What goes on between two of them, generation and the calls of a
turn, is ended and waited for when the stream is left. So a stream may be abandoned at any point, and may be read and
closed by different tasks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self

import anyio

from m3agent.events import Event, Out, Reply
from m3agent.hooks import called
from m3agent.run import Run
from m3agent.turn_loop import TurnLoop

if TYPE_CHECKING:
    from m3agent.runtime import Usage


class RunStream(Generic[Out]):
    """Events of one run: `async with session.stream(…) as events: async for event in events: …`.

    Made by `Session.stream`; nothing happens before the first event is asked for. Leaving the block early stops the
    run: what was generated stays in the session, calls without a result get the result "cancelled", and the session
    can go on. Without the block the same happens as soon as the stream is dropped; tools that are cancelled by that may
    still be in their `finally` blocks, and the session's next run waits for them.
    """

    def __init__(self, run: Run) -> None:
        self._loop = TurnLoop(run)
        self._on_event = run.options.get("on_event")
        self._seconds = run.limits.seconds
        self._deadline: float | None = None  # from the first event on
        self._running: _Running | None = None  # while a step is on its way

    @property
    def reply(self) -> Reply[Out]:
        """What the run came to. Raises RuntimeError before `Done`."""
        if self._loop.reply is None:
            raise RuntimeError("the run has not ended: read the stream to its end first")
        return self._loop.reply

    @property
    def usage(self) -> Usage:
        """What the run has used so far."""
        return self._loop.usage

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._running is not None:
            raise RuntimeError("another task is reading this stream")
        if self._deadline is None:
            self._deadline = math.inf if self._seconds is None else anyio.current_time() + self._seconds
        while not self._loop.events:
            if self._loop.step is None:
                raise StopAsyncIteration
            await self._advance(self._loop.step, self._deadline)
        event = self._loop.events.popleft()
        if (tell := self._on_event) is not None:
            await self._advance(lambda _: called(tell, event))
        return event

    async def aclose(self) -> None:
        """Stop the run, if it has not ended. From any task, also while another one reads; as often as you like."""
        if self._running is not None:
            running = self._running
            running.closed = True
            running.scope.cancel()
            await running.over.wait()
        elif self._loop.step is not None:
            await self._advance(_close)

    async def _advance(self, step: Callable[[TurnLoop], Awaitable[object]], deadline: float = math.inf) -> None:
        # The scope lives inside this one call, so it never crosses tasks; `aclose` of another task cancels it.
        with anyio.CancelScope(deadline=deadline) as scope:
            running = self._running = _Running(scope, anyio.Event())
            try:
                await step(self._loop)
            except BaseException as error:
                cancelled = isinstance(error, anyio.get_cancelled_exc_class())
                try:
                    if cancelled and anyio.current_time() >= deadline and not running.closed:
                        await self._loop.out_of_time()
                finally:
                    await _close(self._loop, None if cancelled else error)
                raise
            finally:
                self._running = None
                running.over.set()

    def __del__(self) -> None:
        if self._loop.step is not None and not sys.is_finalizing():  # then nothing can be imported, and nobody goes on
            self._loop.step = None
            self._loop.stop()


@dataclass
class _Running:
    scope: anyio.CancelScope
    over: anyio.Event
    closed: bool = False


async def _close(loop: TurnLoop, error: BaseException | None = None) -> None:
    if loop.step is not None:
        loop.step = None
        try:
            await loop.halt()
        finally:
            loop.stop(error)
