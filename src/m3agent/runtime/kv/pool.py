"""The page allocator: page numbers with reference counts, in contiguous runs where that is possible.

A sequence whose pages lie side by side is read as one slice; with gaps its keys have to be gathered first. So a
sequence grows into the page right behind its last one, and a new run starts where it has room to grow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import groupby

from m3agent.errors import ContextOverflow


class PagePool:
    """`total` pages, numbered from 0. Every method may be called from any thread."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        self.total = total
        self._references = [0] * total
        self._free = total
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        return self._free

    @property
    def used(self) -> int:
        return self.total - self._free

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages with one reference each, at best the ones right behind page `after`.

        Raises ContextOverflow, and takes nothing, when fewer than `count` pages are free.
        """
        with self._lock:
            if count > self._free:
                raise ContextOverflow(
                    f"the KV cache is full: {count} more pages are needed and {self._free} of {self.total} are free; "
                    "close sessions that are done with, or open the runtime with a larger cache_tokens"
                )
            pages: list[int] = []
            page = self.total if after is None else after + 1
            while len(pages) < count:
                if page >= self.total or self._references[page]:
                    page = self._start_of_run(count - len(pages))
                self._references[page] = 1
                self._free -= 1
                pages.append(page)
                page += 1
            return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page."""
        with self._lock:
            for page in pages:
                if not self._references[page]:
                    raise ValueError(f"page {page} is free and cannot be shared")
                self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; a page without any is free again."""
        with self._lock:
            for page in pages:
                if not self._references[page]:
                    raise ValueError(f"page {page} was released more often than it was taken")
                self._references[page] -= 1
                self._free += not self._references[page]

    def shared(self, page: int) -> bool:
        """Whether more than one sequence holds this page, so that nobody may write to it."""
        return self._references[page] > 1

    def _start_of_run(self, count: int) -> int:
        """Where a run of `count` pages begins: in the widest gap, half-way, so that its left neighbour can grow too."""
        start = best_start = best_length = 0
        for taken, group in groupby(self._references, key=bool):
            length = sum(1 for _ in group)
            if not taken and length > best_length:
                best_start, best_length = start, length
            start += length
        if best_start == 0:
            return 0
        return best_start + max(0, min(best_length // 2, best_length - count))
