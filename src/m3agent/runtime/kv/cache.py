"""`KVCache`: the pages of a device as one store: tables take pages from it, find what others computed, and make room.

Room is made in this order: free pages, pages that are kept for their content alone, pages of sequences that generate
nothing now. Those lose nothing but time: what they need is looked for again by its keys, on the device and in the tiers
below it, and computed where it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

from torch import Tensor

from m3agent.errors import ContextOverflow
from m3agent.model.pages import KVPages
from m3agent.runtime.kv.eight_bit import pack, unpack
from m3agent.runtime.kv.keys import Identity, page_key
from m3agent.runtime.kv.layout import export_page, import_page
from m3agent.runtime.kv.pool import PagePool
from m3agent.runtime.kv.prefix import PrefixIndex, cost
from m3agent.runtime.kv.table import BlockTable
from m3agent.runtime.kv.tiers import Tiers


class KVCache:
    """For the worker alone, but for `new_table`. root: see `keys.root_key`; tiers: below the device, None for none.

    relax() takes the pages from the sequence that was idle for longest; False when no idle one holds any.
    """

    def __init__(
        self,
        pages: KVPages,
        root: bytes,
        relax: Callable[[], bool],
        tiers: Tiers | None = None,
        eight_bit: bool = False,
    ) -> None:
        self.pool = PagePool(pages.pages)
        self.page_tokens = pages.block_size
        self.index = PrefixIndex(self.pool, self.page_tokens)
        self.pages = pages
        self.tiers = tiers
        self._root = root
        self._relax = relax
        self._eight_bit = eight_bit  # in the tiers

    def new_table(self) -> BlockTable:
        return BlockTable(self.pool, self.page_tokens, self._root)

    def find(self, table: BlockTable, ahead: Sequence[Identity]) -> int:
        """Take over the pages on the device that begin with what is behind the table's cached tokens; returns how many
        tokens that was. The last token is never taken over, since its logits are wanted.
        """
        if table.cached != len(table.pages) * self.page_tokens:
            return 0
        found = self.index.find(table.last_key, ahead[:-1])
        self.pool.share(found)
        table.adopt(found, ahead[: len(found) * self.page_tokens])
        return len(found) * self.page_tokens

    def find_part(self, table: BlockTable, ahead: Sequence[Identity]) -> int:
        """The same for the first tokens of one more page, which are copied."""
        if table.cached != len(table.pages) * self.page_tokens:
            return 0
        source, tokens = self.index.find_part(table.last_key, ahead[:-1])
        if source is None:
            return 0
        self.pool.share([source])
        try:
            fresh = self._fresh(table)
        except ContextOverflow:
            return 0
        finally:
            self.pool.release([source])
        self._fill(fresh, lambda: self.pages.copy_page(source, fresh))
        table.adopt([fresh], ahead[:tokens])
        return tokens

    def below(self, table: BlockTable, ahead: Sequence[Identity]) -> list[bytes]:
        """The keys of the full pages ahead that the tiers may have; empty where there are no tiers."""
        if self.tiers is None or table.cached != len(table.pages) * self.page_tokens:
            return []
        keys = [table.last_key]
        for begin in range(0, len(ahead) - self.page_tokens, self.page_tokens):
            keys.append(page_key(keys[-1], ahead[begin : begin + self.page_tokens]))
        return keys[1:]

    def promote(self, table: BlockTable, identities: Sequence[Identity], payload: Mapping[str, Tensor]) -> bool:
        """Take over one full page that a tier delivered; False when there is no room or it is not of this model."""
        try:
            fresh = self._fresh(table)
            page = unpack(payload, self.pages.k[0].dtype)
            self._fill(fresh, lambda: import_page(self.pages, fresh, page))
        except (ContextOverflow, ValueError):
            return False
        table.adopt([fresh], [])
        self.advance(table, identities)
        table.stored = len(table.keys)  # wherever it came from, it is below
        return True

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
            self.index.add(table.pages[number], table.key(number - 1), table.full[number], number, table.keys[number])
        return again

    def settle(self, table: BlockTable) -> None:
        """A request on the table has ended: its last page, though not full, can be found from now on; the full ones go
        to the disk, where there is one.
        """
        place = table.cached // self.page_tokens
        if table.tail and place < len(table.pages):
            self.index.add(table.pages[place], table.last_key, tuple(table.tail), place, None)
        if self.tiers is not None:
            for number, key in islice(enumerate(table.keys), table.stored, None):
                if self.tiers.wanted(key):
                    payload = self._export(table.pages[number])
                    self.tiers.write(key, table.key(number - 1), payload, cost(number))
            table.stored = len(table.keys)

    def _export(self, page: int) -> dict[str, Tensor]:
        """As the tiers have it."""
        payload = export_page(self.pages, page)
        return pack(payload) if self._eight_bit else payload

    def _fresh(self, table: BlockTable) -> int:
        self._make_room(1)
        return self.pool.allocate(1, after=table.pages[-1] if table.pages else None)[0]

    def _fill(self, page: int, fill: Callable[[], None]) -> None:
        try:
            fill()
        except BaseException:
            self.pool.release([page])
            raise

    def _make_room(self, wanted: int) -> None:
        """As far as possible: what is still missing, `PagePool.allocate` says."""
        self._evict(wanted)
        while self.pool.free < wanted and self._relax():
            self._evict(wanted)

    def _evict(self, wanted: int) -> None:
        if self.pool.free >= wanted:
            return
        # A few more than needed, so that not every new page has to look for what can go.
        for entry in self.index.evict(max(wanted - self.pool.free, self.pool.total // 256)):
            if self.tiers is not None and entry.key is not None:
                export = partial(self._export, entry.page)
                self.tiers.demote(entry.key, entry.before, export, cost(entry.depth))
