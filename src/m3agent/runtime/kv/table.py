"""The pages of one sequence: grow, share with a fork, copy a shared page before writing to it, cut back, give back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from m3agent.runtime.kv.pool import PagePool


class BlockTable:
    """The page numbers of one sequence in order; the first `cached` positions in them hold keys and values.

    Not thread-safe: the worker uses it while a request runs on the sequence, and the sequence's owner otherwise.
    """

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self.pool = pool
        self.page_tokens = page_tokens
        self.pages: list[int] = []
        self.cached = 0  # tokens
        self.high_water = 0  # tokens: the most that were ever cached; below it, computing means computing again
        self.closed = False
        self._tensor: Tensor | None = None

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

    def advance(self, tokens: int) -> int:
        """`tokens` more positions hold keys and values; returns how many of them had been computed before."""
        again = max(0, min(self.high_water, self.cached + tokens) - self.cached)
        self.cached += tokens
        self.high_water = max(self.high_water, self.cached)
        return again

    def cut(self, tokens: int) -> None:
        """The sequence has `tokens` tokens and no more: forget what lies behind them, give back pages without any."""
        self.cached = min(self.cached, tokens)
        self.high_water = min(self.high_water, tokens)
        keep = -(-self.cached // self.page_tokens)
        if keep < len(self.pages):
            self.pool.release(self.pages[keep:])
            del self.pages[keep:]
            self._tensor = None

    def fork(self) -> BlockTable:
        """A second sequence with the same past, on the same pages."""
        other = BlockTable(self.pool, self.page_tokens)
        other.pages, other.cached, other.high_water = list(self.pages), self.cached, self.high_water
        self.pool.share(other.pages)
        return other

    def release(self) -> None:
        """Give all pages back."""
        pages, self.pages, self._tensor = self.pages, [], None
        self.cached = 0
        self.pool.release(pages)
