"""`KVCache`: the pages of a device as one store: tables take pages from it, find what others computed, and make room.

Room is made in this order: free pages, pages that are kept for their content alone, pages of sequences that generate
nothing now. Those lose nothing but time: what they need is looked for again by its keys, and computed where it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from m3agent.errors import ContextOverflow
from m3agent.model.pages import KVPages
from m3agent.runtime.kv.keys import Identity
from m3agent.runtime.kv.pool import PagePool
from m3agent.runtime.kv.prefix import PrefixIndex
from m3agent.runtime.kv.table import BlockTable


class KVCache:
    """For the worker alone, but for `new_table`. root: see `keys.root_key`.

    relax() takes the pages from the sequence that was idle for longest; False when no idle one holds any.
    """

    def __init__(self, pages: KVPages, root: bytes, relax: Callable[[], bool]) -> None:
        self.pool = PagePool(pages.pages)
        self.page_tokens = pages.block_size
        self.index = PrefixIndex(self.pool, self.page_tokens)
        self.pages = pages
        self._root = root
        self._relax = relax

    def new_table(self) -> BlockTable:
        return BlockTable(self.pool, self.page_tokens, self._root)

    def find(self, table: BlockTable, ahead: Sequence[Identity]) -> int:
        """Take over what is known of the tokens behind the table's cached ones; returns how many tokens that was.

        The last token is never taken over, since its logits are wanted.
        """
        if table.cached != len(table.pages) * self.page_tokens:
            return 0
        before = table.cached
        found = self.index.find(table.last_key, ahead[:-1])
        self.pool.share(found.pages)
        table.adopt(found.pages, found.identities)
        if found.partial is not None:
            begin = len(found.identities)
            self._copy(found.partial, table, ahead[begin : begin + found.tokens])
        return table.cached - before

    def reserve(self, table: BlockTable, tokens: int) -> None:
        """See `BlockTable.reserve`. Raises ContextOverflow when no room can be made."""
        page = table.next_page
        if page is not None and self.pool.references(page) == 1 and self.index.partial(page):
            self.index.forget(page)  # a page that only this sequence goes on with is not copied
        self._make_room(table.missing(tokens))
        table.reserve(tokens, self.pages.copy_page)

    def advance(self, table: BlockTable, identities: Sequence[Identity]) -> int:
        """See `BlockTable.advance`; pages that have become full can be found from now on."""
        full = len(table.keys)
        again = table.advance(identities)
        for number in range(full, len(table.keys)):
            before = table.keys[number - 1] if number else table.root
            self.index.add(table.pages[number], before, table.full[number], number, table.keys[number])
        return again

    def settle(self, table: BlockTable) -> None:
        """A request on the table has ended: its last page, though not full, can be found from now on."""
        place = table.cached // self.page_tokens
        if table.tail and place < len(table.pages):
            self.index.add(table.pages[place], table.last_key, tuple(table.tail), place, None)

    def _copy(self, source: int, table: BlockTable, identities: Sequence[Identity]) -> None:
        """Begin the table's next page with what another page begins with, where there is room."""
        self.pool.share([source])
        try:
            self._make_room(1)
            fresh = self.pool.allocate(1, after=table.pages[-1] if table.pages else None)
        except ContextOverflow:
            return
        finally:
            self.pool.release([source])
        try:
            self.pages.copy_page(source, fresh[0])
        except BaseException:
            self.pool.release(fresh)
            raise
        table.adopt(fresh, identities)

    def _make_room(self, wanted: int) -> None:
        """As far as possible: what is still missing, `PagePool.allocate` says."""
        self._evict(wanted)
        while self.pool.free < wanted and self._relax():
            self._evict(wanted)

    def _evict(self, wanted: int) -> None:
        if self.pool.free < wanted:
            # A few more than needed, so that not every new page has to look for what can go.
            for _ in self.index.evict(max(wanted - self.pool.free, self.pool.total // 256)):
                pass
