"""The prefix index: pages on the device by the keys of their content, found again by whoever has the same tokens.

A full page is found by its key. A page of which a sequence needs only the first tokens (its own text goes on in another
way, or the page is not full) is found among the pages behind the same key, and copied. What nobody holds is evicted by
GreedyDual: a page's value is what it costs to compute, on top of the value of what was evicted last, and each use
renews it; pages with others behind them stay, since those could not be found without them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from m3agent.runtime.kv.keys import Identity, page_key
from m3agent.runtime.kv.pool import PagePool

# Blocks after which computing a page costs twice what the first one costs: full attention grows with the context.
DEPTH = 256


@dataclass
class Page:
    """One indexed page. key: None for a partly filled one."""

    page: int
    key: bytes | None
    before: bytes
    identities: Sequence[Identity]
    depth: int  # pages before it
    value: float = 0.0
    turn: int = 0
    behind: dict[int, Page] = field(default_factory=dict["int", "Page"])  # by page number


class PrefixIndex:
    """For the worker alone; the pages that are in it are `kept` by the pool."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._by_key: dict[bytes, Page] = {}
        self._by_page: dict[int, Page] = {}
        self._roots: dict[bytes, dict[int, Page]] = {}  # pages behind a key that is not in the index
        self._floor = 0.0
        self._turns = count()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def partial(self, page: int) -> bool:
        """Whether a page is here that is not full."""
        return page in self._by_page and self._by_page[page].key is None

    def add(self, page: int, before: bytes, identities: Sequence[Identity], depth: int, key: bytes | None) -> None:
        """A held page and what it is about; key: None while it is not full. A second page of one key is not kept."""
        if page in self._by_page or (key is not None and key in self._by_key):
            return
        entry = Page(page, key, before, identities, depth)
        self._pool.keep(page)
        self._by_page[page] = entry
        self._behind(before, make=True)[page] = entry
        if key is not None:
            self._by_key[key] = entry
            entry.behind = self._roots.pop(key, entry.behind)
        self._renew(entry)

    def forget(self, page: int) -> Page | None:
        """Take a page out, whoever holds it."""
        entry = self._by_page.pop(page, None)
        if entry is None:
            return None
        self._pool.forget(page)
        siblings = self._behind(entry.before)
        del siblings[page]
        if not siblings:
            self._roots.pop(entry.before, None)
        if entry.key is not None:
            del self._by_key[entry.key]
            if entry.behind:
                self._roots[entry.key] = entry.behind
        return entry

    def find(self, before: bytes, identities: Sequence[Identity]) -> list[int]:
        """The full pages that `identities`, which follow the page `before`, begin with. Takes no reference."""
        pages: list[int] = []
        size = self._page_tokens
        for place in range(0, len(identities) - size + 1, size):
            before = page_key(before, identities[place : place + size])
            entry = self._by_key.get(before)
            if entry is None:
                break
            self._renew(entry)
            pages.append(entry.page)
        return pages

    def find_part(self, before: bytes, identities: Sequence[Identity]) -> tuple[int | None, int]:
        """Of the pages behind `before`, the one that agrees in the most first tokens, and how many these are."""
        wanted = identities[: self._page_tokens]
        best, tokens = None, 0
        for entry in self._behind(before).values():
            same = _common(entry.identities, wanted)
            if same > tokens:
                best, tokens = entry, same
        if best is None:
            return None, 0
        self._renew(best)
        return best.page, tokens

    def evict(self, wanted: int) -> Iterator[Page]:
        """Take out up to `wanted` pages that nobody holds, the least valuable first; each is yielded before it goes."""
        idle = [entry for entry in self._by_page.values() if not entry.behind and not self._pool.references(entry.page)]
        heap = [(entry.value, entry.turn, entry.page) for entry in idle]
        heapq.heapify(heap)
        while heap and wanted > 0:
            value, _, page = heapq.heappop(heap)
            entry = self._by_page[page]
            yield entry
            self._floor = max(self._floor, value)
            self.forget(page)
            self.evicted += 1
            wanted -= 1
            parent = self._by_key.get(entry.before)
            if parent is not None and not parent.behind and not self._pool.references(parent.page):
                heapq.heappush(heap, (parent.value, parent.turn, parent.page))

    def _behind(self, key: bytes, make: bool = False) -> dict[int, Page]:
        entry = self._by_key.get(key)
        if entry is not None:
            return entry.behind
        return self._roots.setdefault(key, {}) if make else self._roots.get(key, {})

    def _renew(self, entry: Page) -> None:
        entry.value = self._floor + cost(entry.depth)
        entry.turn = next(self._turns)


def cost(depth: int) -> float:
    """What computing a page costs that has `depth` pages before it; the first one costs 1."""
    return 1.0 + depth / DEPTH


def _common(a: Sequence[Identity], b: Sequence[Identity]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
