"""The page allocator: page numbers with reference counts, in contiguous runs where that is possible.

A page is held by sequences (counted), or kept for its content although none holds it, or free. A sequence whose pages
lie side by side is read as one slice, so a sequence grows into the page right behind its last one, and a new run starts
where it has room to grow.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from m3agent.errors import ContextOverflow


class PagePool:
    """`total` pages, numbered from 0. Every method may be called from any thread."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        self.total = total
        self._references = np.zeros(total, np.int32)
        self._kept = np.zeros(total, np.bool_)
        self._held = 0
        self._cached = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self._held

    @property
    def cached(self) -> int:
        """Pages that are kept for their content alone."""
        return self._cached

    @property
    def free(self) -> int:
        return self.total - self._held - self._cached

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages with one reference each, at best the ones right behind page `after`.

        Raises ContextOverflow, and takes nothing, when fewer than `count` pages are free.
        """
        with self._lock:
            if count > self.free:
                raise ContextOverflow(
                    f"the KV cache is full: {count} more pages are needed and {self.free} of {self.total} are free; "
                    "close sessions that are done with, or open the runtime with a larger cache_tokens"
                )
            pages: list[int] = []
            page = self.total if after is None else after + 1
            while len(pages) < count:
                if page >= self.total or self._references[page] or self._kept[page]:
                    page = self._start_of_run(count - len(pages))
                self._references[page] = 1
                self._held += 1
                pages.append(page)
                page += 1
            return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each page, which someone holds or which is kept."""
        rows = np.asarray(pages, np.int64)
        with self._lock:
            before = self._references[rows]
            idle = before == 0
            if np.any(idle & ~self._kept[rows]):
                raise ValueError(f"page {rows[idle & ~self._kept[rows]][0]} is free and cannot be shared")
            self._references[rows] += 1
            self._held += int(idle.sum())
            self._cached -= int(idle.sum())

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each page; a page without any is free again, or cached if it is kept."""
        rows = np.asarray(pages, np.int64)
        with self._lock:
            if np.any(self._references[rows] == 0):
                page = rows[self._references[rows] == 0][0]
                raise ValueError(f"page {page} was released more often than it was taken")
            self._references[rows] -= 1
            idle = self._references[rows] == 0
            self._held -= int(idle.sum())
            self._cached += int((idle & self._kept[rows]).sum())

    def keep(self, page: int) -> None:
        """Do not free this page, which somebody holds, when nobody holds it any more."""
        with self._lock:
            if not self._references[page]:
                raise ValueError(f"page {page} is not held")
            self._kept[page] = True

    def forget(self, page: int) -> None:
        """The end of `keep`."""
        with self._lock:
            if self._kept[page]:
                self._kept[page] = False
                self._cached -= not self._references[page]

    def references(self, page: int) -> int:
        """How many sequences hold a page."""
        return int(self._references[page])

    def shared(self, page: int) -> bool:
        """Whether a sequence that holds this page must not write to it: others hold it, or it is kept."""
        return bool(self._references[page] > 1 or self._kept[page])

    def _start_of_run(self, count: int) -> int:
        """Where a run of `count` pages begins: in the widest gap, half-way, so that its left neighbour can grow too."""
        taken = np.concatenate(([True], (self._references != 0) | self._kept, [True]))
        edges = np.flatnonzero(taken[1:] != taken[:-1])  # where gaps begin and end, in turn
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        widest = int(lengths.argmax())
        begin, length = int(begins[widest]), int(lengths[widest])
        if begin == 0:
            return 0
        return begin + max(0, min(length // 2, length - count))
