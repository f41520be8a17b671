"""Which requests run, which wait for pages, and which wait for the disk; and how their tables get their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m3agent.errors import ContextOverflow
from m3agent.runtime.kv import BlockTable, KVCache
from m3agent.runtime.kv.keys import Identity
from m3agent.runtime.kv.tiers import Payload
from m3agent.runtime.request import Request


@dataclass(frozen=True)
class Fetched:
    """Pages that the tiers delivered for a request; last: no more will come."""

    request: Request
    pages: list[Payload]
    last: bool


class Queues:
    """For the worker alone. deliver is called in the tiers' thread and hands what came back to the worker. most:
    requests that run at a time, None for any number.
    """

    def __init__(self, cache: KVCache, deliver: Callable[[Fetched], None], most: int | None = None) -> None:
        self.active: list[Request] = []
        self.waiting: list[Request] = []  # for their turn, or for pages, having been preempted
        self.fetching: list[Request] = []
        self.found = self.promoted = self.preempted = 0  # tokens, tokens, requests
        self._cache = cache
        self._most = most
        self._deliver = deliver

    @property
    def runnable(self) -> bool:
        """Whether there is something to compute."""
        return bool(self.active) or (bool(self.waiting) and not self.full)

    @property
    def all(self) -> list[Request]:
        return self.active + self.waiting + self.fetching

    @property
    def full(self) -> bool:
        """Whether as many run as may."""
        return self._most is not None and len(self.active) + len(self.fetching) >= self._most

    def remove(self, request: Request) -> None:
        for queue in (self.active, self.waiting, self.fetching):
            if request in queue:
                queue.remove(request)

    def find(self, request: Request) -> None:
        """An active request takes over what is known of its pending tokens, or waits for what the tiers may have."""
        self._take_over(request, self._cache.find)
        keys = self._cache.below(request.table, request.ahead)
        if keys and self._cache.tiers is not None:
            self.active.remove(request)
            self.fetching.append(request)
            self._cache.tiers.fetch(
                keys,
                lambda pages, last: self._deliver(Fetched(request, pages, last)),
                lambda: request.cancelled or request.ended,
            )
        else:
            self._take_over(request, self._cache.find_part)

    def promote(self, fetched: Fetched) -> None:
        """Pages have come from below: into the device with them, and on with the request after the last one."""
        request, size = fetched.request, self._cache.page_tokens
        if request not in self.fetching:
            return  # it has ended meanwhile
        for payload in [] if request.cancelled else fetched.pages:
            if not self._cache.promote(request.table, request.ahead[:size], payload):
                break
            self.promoted += size
            request.adopted(size)
        if fetched.last:
            self._take_over(request, self._cache.find_part)
            self.fetching.remove(request)
            self.active.append(request)

    def reserve(self, request: Request, end: int) -> bool:
        """Pages up to position `end`, if need be from requests that came later; False when this one has to wait.

        Raises ContextOverflow when it is the only one and all pages are not enough.
        """
        while True:
            try:
                self._cache.reserve(request.table, end)
                return True
            except ContextOverflow:
                queued = [other for other in self.waiting if other.table.pages]
                if queued:
                    self._relax(max(queued, key=_turn))
                    continue
                if len(self.active) == 1:
                    raise
                last = max(self.active, key=_turn)
                self._preempt(last)
                if last is request:
                    return False

    def resume(self, idle_pages: Callable[[], int]) -> list[Request]:
        """Activate requests that wait, the first ones first, as far as they fit; they have to `find` then."""
        resumed: list[Request] = []
        while self.waiting and not self.full:
            request = min(self.waiting, key=_turn)
            pool, size = self._cache.pool, self._cache.page_tokens
            needed = len(request.pending) // size + 1 + len(self.active)  # each of the others may want a page, too
            if self.active and needed > pool.free + pool.cached + idle_pages():
                break
            self.waiting.remove(request)
            self.active.append(request)
            resumed.append(request)
        return resumed

    def _preempt(self, request: Request) -> None:
        """Take a request's pages and let it wait; nothing that it made is lost."""
        self._relax(request)
        self.active.remove(request)
        self.waiting.append(request)
        self.preempted += 1

    def _relax(self, request: Request) -> None:
        self._cache.settle(request.table)
        request.relax()

    def _take_over(self, request: Request, find: Callable[[BlockTable, list[Identity]], int]) -> None:
        found = find(request.table, request.ahead)
        self.found += found
        request.adopted(found)


def _turn(request: Request) -> tuple[int, int]:
    """Who comes first, and, the other way round, who gives way."""
    return -request.priority, request.table.used
