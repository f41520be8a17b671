"""Where pages go that leave the device, and where they are fetched from: host memory, then the disk.

One thread does the reading and writing, reading first; the engine's worker only copies pages to and from the device. A
page that cannot be written in time is not written: it is computed again when it is wanted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from queue import PriorityQueue

from torch import Tensor

from m3agent.runtime.kv.store import DiskStore

BATCH = 8  # pages that are delivered together
WRITE_LIMIT = 512 << 20  # bytes that may wait to be written
READ, WRITE, STOP = 0, 1, 2

Payload = dict[str, Tensor]
Deliver = Callable[[list[Payload], bool], None]


class HostTier:
    """Pages in the host's memory, up to `limit` bytes; the least recently used ones go first. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, Payload] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._pages)

    def wants(self, key: bytes) -> bool:
        return self._limit > 0 and key not in self._pages

    def put(self, key: bytes, payload: Payload) -> None:
        size = _size(payload)
        with self._lock:
            if key in self._pages or size > self._limit:
                return
            self._pages[key] = payload
            self.size += size
            while self.size > self._limit:
                _, old = self._pages.popitem(last=False)
                self.size -= _size(old)

    def get(self, key: bytes) -> Payload | None:
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)
            return self._pages.get(key)


class Tiers:
    """host: bytes of host memory, 0 for none. The thread starts with the first fetch or write."""

    def __init__(self, host: int, disk: DiskStore | None) -> None:
        self.host = HostTier(host)
        self.disk = disk
        self._written: OrderedDict[bytes, None] = OrderedDict()  # keys that are on the disk, or on their way
        self._waiting = 0  # bytes to be written
        self.dropped_writes = 0
        self._order = count()
        self._queue: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._thread: threading.Thread | None = None

    def demote(self, key: bytes, before: bytes, export: Callable[[], Payload], cost: float) -> None:
        """A page leaves the device. export() copies it; it is not called for a page that is below already."""
        keep, write = self.host.wants(key), self.wanted(key)
        if keep or write:
            payload = export()
            if keep:
                self.host.put(key, payload)
            if write:
                self.write(key, before, payload, cost)

    def wanted(self, key: bytes) -> bool:
        """Whether the disk should get this page, as far as is known without asking it."""
        return self.disk is not None and key not in self._written

    def write(self, key: bytes, before: bytes, payload: Payload, cost: float) -> None:
        """Store a page on the disk, later. For the worker alone, as `wanted`."""
        disk, size = self.disk, _size(payload)
        if disk is None:
            return
        if self._waiting + size > WRITE_LIMIT:
            self.dropped_writes += 1
            return
        self._waiting += size
        self._written[key] = None
        while len(self._written) > 1 << 20:
            self._written.popitem(last=False)

        def put() -> None:
            disk.put(key, before, payload, cost)
            self._waiting -= size

        self._ask(WRITE, put)

    def fetch(self, keys: Sequence[bytes], deliver: Deliver, gone: Callable[[], bool]) -> None:
        """Read pages from the first key on, until one is nowhere; deliver(payloads, last) is called in the thread.

        gone(): nobody wants them any more.
        """

        def read() -> None:
            pages: list[Payload] = []
            touched: list[bytes] = []
            try:
                for key in keys:
                    page = None if gone() else self.host.get(key)
                    if (
                        page is None
                        and not gone()
                        and self.disk is not None
                        and (page := self.disk.get(key)) is not None
                    ):
                        touched.append(key)
                    if page is None:
                        break
                    pages.append(page)
                    if len(pages) == BATCH:
                        deliver(pages, False)
                        pages = []
            finally:
                deliver(pages, True)
            if touched and self.disk is not None:
                self.disk.touch(touched)

        self._ask(READ, read)

    def flush(self) -> None:
        """Wait until everything is written that was to be written."""
        if self._thread is not None:
            done = threading.Event()
            self._ask(WRITE, done.set)
            done.wait()

    def close(self) -> None:
        """Write what waits, then end the thread."""
        if self._thread is not None:
            self._ask(STOP, None)
            self._thread.join()
            self._thread = None
        if self.disk is not None:
            self.disk.close()

    def _ask(self, urgency: int, work: Callable[[], None] | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="m3agent-pages", daemon=True)
            self._thread.start()
        self._queue.put((urgency, next(self._order), work))

    def _work(self) -> None:
        while (work := self._queue.get()[2]) is not None:
            try:
                work()
            except Exception:  # a page less; a fetch has delivered what it had, the store counts its own failures
                self.dropped_writes += 1


def _size(payload: Payload) -> int:
    return sum(part.nbytes for part in payload.values())
