"""From a thread to a task: a queue that any thread fills and one task at a time reads.

The thread never waits for an event loop, and no loop is fixed beforehand: whoever reads says, each time it has to
wait, which loop to wake. So what was opened under one loop serves another, asyncio or trio.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint, current_token

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._wake: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def put(self, item: Item) -> None:
        """Add an item, from any thread, without waiting."""
        with self._lock:
            self._items.append(item)
            wake, self._wake = self._wake, None
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # the reader's loop has ended, and the reader with it
                wake()

    async def get(self) -> Item:
        """The next item. A cancelled call takes none."""
        if self._items:
            await checkpoint()  # a reader that never has to wait must not keep the loop to itself
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                ready = anyio.Event()
                self._wake = _waker(ready)
            await ready.wait()


def _waker(event: anyio.Event) -> Callable[[], None]:
    """A function that sets the event in the loop that runs now, and may be called from any thread."""
    loop: Any = current_token().native_token
    schedule = loop.call_soon_threadsafe if hasattr(loop, "call_soon_threadsafe") else loop.run_sync_soon
    return lambda: schedule(event.set)


async def outcome_of(future: Future[Item]) -> Item:
    """The result of a future of another thread, in any event loop. Cancelled here, it is cancelled there."""
    box = Mailbox[Any]()
    future.add_done_callback(box.put)
    try:
        await box.get()
    except BaseException:
        future.cancel()
        raise
    return future.result()
