"""The pages of one sequence: grow, share with a fork, copy a shared page before writing to it, cut back, give back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from m3agent.runtime.kv.keys import Identity, page_key
from m3agent.runtime.kv.pool import PagePool


class BlockTable:
    """The page numbers of one sequence in order; the first `cached` positions in them hold keys and values.

    Not thread-safe: the worker uses it while a request runs on the sequence, whoever has the engine's lock otherwise.
    """

    def __init__(self, pool: PagePool, page_tokens: int, root: bytes = b"") -> None:
        self.pool = pool
        self.page_tokens = page_tokens
        self.root = root
        self.pages: list[int] = []
        self.cached = 0  # tokens
        self.high_water = 0  # tokens: the most that were ever cached; below it, computing means computing again
        self.keys: list[bytes] = []  # of the full pages
        self.full: list[tuple[Identity, ...]] = []  # what the full pages are about
        self.tail: list[Identity] = []  # and the tokens behind them
        self.stored = 0  # how many of the full pages were offered to the disk
        self.used = 0  # the engine's count of requests when it was used last
        self.closed = False
        self.name = ""  # for whoever looks
        self._tensor: Tensor | None = None

    @property
    def last_key(self) -> bytes:
        """The key of the last full page; the root where there is none."""
        return self.keys[-1] if self.keys else self.root

    def key(self, page: int) -> bytes:
        """The key of the sequence's page with this number; the root for -1."""
        return self.keys[page] if page >= 0 else self.root

    @property
    def identities(self) -> list[Identity]:
        """What the cached tokens are."""
        return [*chain.from_iterable(self.full), *self.tail]

    @property
    def next_page(self) -> int | None:
        """The page that the next token goes into, where the table has it already."""
        place = self.cached // self.page_tokens
        return self.pages[place] if place < len(self.pages) else None

    def missing(self, tokens: int) -> int:
        """How many pages `reserve` takes from the pool."""
        page = self.next_page
        copies = page is not None and self.pool.shared(page)
        return max(0, -(-tokens // self.page_tokens) - len(self.pages)) + copies

    def reserve(self, tokens: int, copy_page: Callable[[int, int], None]) -> None:
        """Make room for positions `cached` to `tokens` - 1, in pages that only this sequence holds.

        copy_page(source, target) copies what a page holds. Raises ContextOverflow when the pool has too few pages, and
        what copy_page raises; nothing has changed then.
        """
        needed = -(-tokens // self.page_tokens) - len(self.pages)
        partial = self.cached // self.page_tokens  # index of the page that the next token goes into
        copies = partial < len(self.pages) and self.pool.shared(self.pages[partial])
        if needed <= 0 and not copies:
            return
        kept = self.pages[:partial] if copies else self.pages
        fresh = self.pool.allocate(max(needed, 0) + copies, after=kept[-1] if kept else None)
        if copies:
            source = self.pages[partial]
            if self.cached % self.page_tokens:
                try:
                    copy_page(source, fresh[0])
                except BaseException:
                    self.pool.release(fresh)
                    raise
            self.pages[partial] = fresh.pop(0)
            self.pool.release([source])
        self.pages.extend(fresh)
        self._tensor = None

    def tensor(self, device: torch.device) -> Tensor:
        """The page numbers, int64 [pages]; made once for every change."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.pages, dtype=torch.int64, device=device)
        return self._tensor

    def advance(self, identities: Sequence[Identity]) -> int:
        """So many more positions hold keys and values; returns how many of them had been computed before."""
        again = max(0, min(self.high_water, self.cached + len(identities)) - self.cached)
        self.cached += len(identities)
        self.high_water = max(self.high_water, self.cached)
        self.tail += identities
        while len(self.tail) >= self.page_tokens:
            page = tuple(self.tail[: self.page_tokens])
            del self.tail[: self.page_tokens]
            self.keys.append(page_key(self.last_key, page))
            self.full.append(page)
        return again

    def adopt(self, pages: list[int], identities: Sequence[Identity]) -> None:
        """Behind a page's edge: the next positions are in these pages, of which this sequence has a reference each."""
        self.pages += pages
        self._tensor = None
        self.advance(identities)

    def rewind(self, tokens: int) -> None:
        """Only the first `tokens` positions count as cached. What is behind them may be computed again."""
        self.cached = tokens
        full = tokens // self.page_tokens
        if full < len(self.full):
            self.tail = list(self.full[full])
            del self.keys[full:], self.full[full:]
            self.stored = min(self.stored, full)
        del self.tail[tokens % self.page_tokens :]

    def cut(self, tokens: int) -> None:
        """The sequence has `tokens` tokens and no more: forget what lies behind them, give back pages without any."""
        self.high_water = min(self.high_water, tokens)
        if tokens < self.cached:
            self.rewind(tokens)
        keep = -(-self.cached // self.page_tokens)
        if keep < len(self.pages):
            self.pool.release(self.pages[keep:])
            del self.pages[keep:]
            self._tensor = None

    def fork(self) -> BlockTable:
        """A second sequence with the same past, on the same pages."""
        other = BlockTable(self.pool, self.page_tokens, self.root)
        other.pages, other.cached, other.high_water = list(self.pages), self.cached, self.high_water
        other.keys, other.full, other.tail = list(self.keys), list(self.full), list(self.tail)
        other.used, other.stored, other.name = self.used, self.stored, self.name
        self.pool.share(other.pages)
        return other

    def release(self) -> None:
        """Give all pages back. What is kept of them can be found again by its keys."""
        pages, self.pages, self._tensor = self.pages, [], None
        self.rewind(0)
        self.pool.release(pages)
