"""One connection to an MCP server, in a thread with an event loop of its own.

The client's task groups have to be left in the task that entered them. A toolset is opened in one task, used in many,
closed in another, and lives under asyncio, trio or no loop at all; so the connection belongs to one task here, from
its first byte to its last, and calls come to it through a mailbox.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio
from anyio.abc import TaskGroup

from m3agent.errors import ToolError
from m3agent.mailbox import Mailbox
from m3agent.tools.arguments import clip

if TYPE_CHECKING:
    from mcp import Client


Result = TypeVar("Result")
_LINES = 5  # of what a server said last, for error messages


@dataclass(frozen=True)
class Target:
    """A server: `command` with its arguments, or `url`."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    cwd: str | os.PathLike[str] | None = None
    url: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)  # they may hold a secret

    @property
    def name(self) -> str:
        return clip(self.url or " ".join(self.command), 100)


class Gone(ToolError):
    """The connection is closed, or the server ended."""


class Call(Generic[Result]):
    """Work for the owner. `future` is done when it is; it is cancelled when the connection ends around it."""

    def __init__(self, work: Callable[[Client], Awaitable[Result]], inbox: Mailbox[Callable[[], None]]) -> None:
        self.future: Future[Result] = Future()
        self._work = work
        self._inbox = inbox
        self._scope: anyio.CancelScope | None = None
        self._stopped = False

    def cancel(self) -> None:
        """From any thread, without waiting: the owner may be busy with what a server sends."""
        self._inbox.put(self._stop)

    def _stop(self) -> None:
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    async def run(self, client: Client) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if not self._stopped:
                    self.future.set_result(await self._work(client))
        except Exception as error:
            self.future.set_exception(error)
        finally:
            self.future.cancel()  # does nothing when it is done


class Connection:
    """Opens with `start`; `opened` and `closed` say how that went. Everything public is for any thread, and waits for
    nothing.
    """

    def __init__(self, target: Target, seconds: float) -> None:
        self.opened: Future[None] = Future()
        self.closed: Future[None] = Future()
        self.refused: dict[str, str] = {}  # malformed tools of the last listing, with the reason
        self._target = target
        self._seconds = seconds
        self._errors: deque[str] = deque(maxlen=_LINES)
        self._inbox = Mailbox[Callable[[], None]]()  # run in the owner's loop, in this order
        self._calls: set[Call[Any]] = set()
        self._stopping = self._ended = False
        self._reason = ""
        self._lock = threading.Lock()
        self._leave: Callable[[], None] | None = None
        self._client: Client | None = None
        self._group: TaskGroup | None = None  # of the calls

    def start(self) -> None:
        # In an empty context: the caller's says which event loop it runs under.
        run = contextvars.Context().run
        threading.Thread(target=run, args=(self._run,), name="m3agent-mcp", daemon=True).start()

    def stop(self) -> None:
        """Begin to close; `closed` is done when the server has ended."""
        self._stopping = True
        self._inbox.put(lambda: self._leave() if self._leave is not None else None)

    @property
    def alive(self) -> bool:
        return not (self._reason or self._stopping or self._ended)

    def submit(self, work: Callable[[Client], Awaitable[Result]]) -> Call[Result]:
        """Run `work(client)` in the owner's loop. Raises Gone."""
        call = Call(work, self._inbox)
        with self._lock:
            if self._client is None or not self.alive:
                raise self.gone()
            self._calls.add(call)
        call.future.add_done_callback(lambda _: self._calls.discard(call))
        self._inbox.put(lambda: self._begin(call))
        return call

    def lost(self, reason: str) -> None:
        """The first sign that the server is gone."""
        self._reason = self._reason or reason

    def gone(self) -> Gone:
        why = self._reason or "it was closed"
        said = "".join(f"\n{line}" for line in self.said())
        return Gone(f"MCP server {self._target.name!r} is gone: {why}." + (f" Its last output:{said}" if said else ""))

    def said(self) -> list[str]:
        """The last lines of a program's standard error; of HTTP, the last answers that were errors."""
        return [clip(line, 200) for line in list(self._errors)]  # copied: another thread adds to it

    def _begin(self, call: Call[Any]) -> None:
        if self._group is None or self._client is None:  # it broke down since
            call.future.cancel()
        else:
            self._group.start_soon(call.run, self._client)

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            anyio.run(self._live, backend="asyncio")
        except BaseException as error:
            problem = _innermost(error)
        if problem is not None:
            self.lost(f"{type(problem).__name__}: {problem}")
        elif not self._stopping:
            self.lost("it ended")
        with self._lock:
            self._ended = True
            left = list(self._calls)
        for call in left:  # submitted, and never begun
            call.future.cancel()
        if not self.opened.done():
            self.opened.set_exception(problem or TimeoutError(f"no answer in {self._seconds:g} s"))
        self.closed.set_result(None)

    async def _live(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hold, tasks.cancel_scope)
            while True:
                (await self._inbox.get())()

    async def _hold(self, everything: anyio.CancelScope) -> None:
        """The one task that enters the connection, stays in it and leaves it."""
        from m3agent.tools.mcp.transport import open_client

        try:
            with anyio.CancelScope(deadline=anyio.current_time() + self._seconds) as opening:
                started = partial(self._started, opening)
                async with open_client(self._target, self._errors, self.refused, started) as self._client:
                    opening.deadline = math.inf
                    await self._serve()
        finally:
            everything.cancel()

    def _started(self, opening: anyio.CancelScope) -> None:
        # Not before: a cancellation while the program is being started would leave it behind.
        self._leave = opening.cancel
        if self._stopping:
            opening.cancel()

    async def _serve(self) -> None:
        leaving = anyio.Event()
        self._leave = leaving.set
        try:
            async with anyio.create_task_group() as self._group:
                self.opened.set_result(None)
                if not self._stopping:
                    await leaving.wait()
                self._group.cancel_scope.cancel()
        finally:
            self._group = None


def _innermost(error: BaseException) -> BaseException:
    """A task group wraps what went wrong in it."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


async def wait(future: Future[Result]) -> Result:
    """Wait for a future of another thread, in any event loop."""
    box = Mailbox[Any]()
    future.add_done_callback(box.put)
    await box.get()
    return future.result()


async def outcome(call: Call[Result], box: Mailbox[Any], told: Callable[[Any], Awaitable[None]]) -> Result:
    """The call's result, in any event loop. What is put into `box` meanwhile goes to `told`. Cancelled here, the call
    is cancelled there.
    """
    call.future.add_done_callback(box.put)
    try:
        while (item := await box.get()) is not call.future:
            await told(item)
    except BaseException:
        call.cancel()
        raise
    return call.future.result()
