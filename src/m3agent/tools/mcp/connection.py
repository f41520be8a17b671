"""One connection to an MCP server, in a thread with an event loop of its own.

The client's task groups have to be left in the task that entered them. A toolset is opened in one task, used in many,
closed in another, and lives under asyncio, trio or no loop at all; so the connection belongs to one task here, from
its first byte to its last, and calls come to it through a portal.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
from anyio.from_thread import BlockingPortal

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


class Connection:
    """Opens with `start`; `opened` and `closed` say how that went. Everything here may be called from any thread."""

    def __init__(self, target: Target, seconds: float) -> None:
        self.opened: Future[None] = Future()
        self.closed: Future[None] = Future()
        self.refused: dict[str, str] = {}  # malformed tools of the last listing, with the reason
        self._target = target
        self._seconds = seconds
        self._errors: deque[str] = deque(maxlen=_LINES)
        self._client: Client | None = None
        self._portal: BlockingPortal | None = None
        self._stop: Callable[[], None] | None = None
        self._stopping = False
        self._reason = ""
        self._lock = threading.Lock()

    def start(self) -> None:
        # In an empty context: the caller's says which event loop it runs under.
        run = contextvars.Context().run
        threading.Thread(target=run, args=(self._run,), name="m3agent-mcp", daemon=True).start()

    def stop(self) -> None:
        """Begin to close; `closed` is done when the server has ended."""
        with self._lock:
            self._stopping = True
            stop = self._stop
        if stop is not None:
            stop()

    @property
    def alive(self) -> bool:
        return not self._reason and not self._stopping

    def submit(self, work: Callable[[Client], Awaitable[Result]]) -> Future[Result]:
        """Run `work(client)` in the owner's loop. Cancel the future to cancel it. Raises Gone."""
        client, portal = self._client, self._portal
        if client is None or portal is None or not self.alive:
            raise self.gone()
        try:
            return portal.start_task_soon(work, client)
        except RuntimeError:  # it closed just now
            raise self.gone() from None

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

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            anyio.run(self._live, backend="asyncio")
        except BaseException as error:
            problem = _innermost(error)
        if problem is not None:
            self.lost(f"{type(problem).__name__}: {problem}")
        if not self.opened.done():
            self.opened.set_exception(problem or TimeoutError(f"no answer in {self._seconds:g} s"))
        self._reason = self._reason or ("" if self._stopping else "the connection ended")
        self.closed.set_result(None)

    async def _live(self) -> None:
        from m3agent.tools.mcp.transport import open_client

        until = anyio.Event()
        async with BlockingPortal() as outer:
            with anyio.CancelScope(deadline=anyio.current_time() + self._seconds) as scope:
                with self._lock:
                    self._stop = lambda: _post(outer, lambda: until.set() if self.opened.done() else scope.cancel())
                    if self._stopping:
                        return
                async with open_client(self._target, self._errors, self.refused) as client, BlockingPortal() as portal:
                    scope.deadline = math.inf
                    self._client, self._portal = client, portal
                    self.opened.set_result(None)
                    await until.wait()
                    await portal.stop(cancel_remaining=True)


def _post(portal: BlockingPortal, work: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # it has ended already
        portal.start_task_soon(work)


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


async def outcome(future: Future[Result], box: Mailbox[Any], told: Callable[[Any], Awaitable[None]]) -> Result:
    """As `wait`, and what is put into `box` meanwhile goes to `told`. Cancelled here, it is cancelled there."""
    future.add_done_callback(box.put)
    try:
        while (item := await box.get()) is not future:
            await told(item)
    except BaseException:
        future.cancel()
        raise
    return future.result()
