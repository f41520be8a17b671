"""Pages return whatever is done with them, no page is handed out twice, and runs are contiguous where they can be."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from m3agent.errors import ContextOverflow
from m3agent.runtime.kv import BlockTable, PagePool

PAGE = 4


class Pages(RuleBasedStateMachine):
    """Tables over a small pool against plain lists: `memory` is what a page holds, `logs` what a sequence wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.memory = [[-1] * PAGE for _ in range(12)]
        self.tables: list[BlockTable] = []
        self.logs: list[list[int]] = []
        self.clock = 0

    def copy_page(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])

    @precondition(lambda self: len(self.tables) < 4)
    @rule()
    def open(self) -> None:
        self.tables.append(BlockTable(self.pool, PAGE))
        self.logs.append([])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), count=st.integers(1, 11))
    def grow(self, which: int, count: int) -> None:
        table, log = self.tables[which % len(self.tables)], self.logs[which % len(self.tables)]
        before = (list(table.pages), self.pool.free)
        try:
            table.reserve(len(log) + count, self.copy_page)
        except ContextOverflow:
            assert (table.pages, self.pool.free) == before
            return
        for position in range(len(log), len(log) + count):
            self.memory[table.pages[position // PAGE]][position % PAGE] = self.clock
            log.append(self.clock)
            self.clock += 1
        table.advance(log[-count:])

    @precondition(lambda self: 0 < len(self.tables) < 4)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        self.tables.append(self.tables[which % len(self.tables)].fork())
        self.logs.append(list(self.logs[which % len(self.logs)]))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), back=st.integers(0, 9))
    def cut(self, which: int, back: int) -> None:
        table, log = self.tables[which % len(self.tables)], self.logs[which % len(self.tables)]
        del log[max(0, len(log) - back) :]
        table.cut(len(log))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        self.tables.pop(which % len(self.tables)).release()
        self.logs.pop(which % (len(self.logs)))

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for table, log in zip(self.tables, self.logs, strict=True):
            assert table.cached == len(log)
            assert table.identities == log
            assert [self.memory[table.pages[p // PAGE]][p % PAGE] for p in range(len(log))] == log

    @invariant()
    def pages_are_counted(self) -> None:
        held = {page for table in self.tables for page in table.pages}
        assert self.pool.used == len(held)
        assert all(len(table.pages) == -(-len(log) // PAGE) for table, log in zip(self.tables, self.logs, strict=True))

    def teardown(self) -> None:
        for table in self.tables:
            table.release()
        assert self.pool.free == self.pool.total


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=30)


def test_who_writes_first_to_a_shared_page_gets_a_copy() -> None:
    pool, copies = PagePool(8), list[tuple[int, int]]()
    parent = BlockTable(pool, PAGE)
    parent.reserve(6, lambda *pages: copies.append(pages))
    parent.advance([1] * 6)
    child = parent.fork()
    shared = list(parent.pages)
    for table in (child, parent):
        table.reserve(7, lambda *pages: copies.append(pages))
        table.advance([2])
    assert parent.pages == shared
    assert child.pages[0] == shared[0]
    assert copies == [(shared[1], child.pages[1])]
    assert pool.used == 3


def test_sequences_that_grow_in_turn_stay_contiguous() -> None:
    pool = PagePool(64)
    tables = [BlockTable(pool, PAGE) for _ in range(3)]
    for step in range(1, 9):
        for table in tables:
            table.reserve(step * PAGE, lambda source, target: None)
            table.advance([3] * PAGE)
    for table in tables:
        assert table.pages == list(range(table.pages[0], table.pages[0] + 8))


def test_a_full_pool_takes_nothing_and_says_what_to_do() -> None:
    pool = PagePool(4)
    taken = pool.allocate(3)
    with pytest.raises(ContextOverflow, match=r"2 more pages are needed and 1 of 4 are free.*cache_tokens"):
        pool.allocate(2)
    assert pool.free == 1
    pool.release(taken)
    assert len(set(pool.allocate(4))) == 4


def test_releasing_twice_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="more often"):
        pool.release(pages)


def test_a_rewound_token_counts_as_computed_again_and_a_replaced_one_does_not() -> None:
    table = BlockTable(PagePool(4), PAGE)
    table.reserve(6, lambda source, target: None)
    assert table.advance([1, 2, 3, 4, 5, 6]) == 0
    table.rewind(5)
    assert table.advance([6]) == 1
    table.cut(3)
    table.reserve(6, lambda source, target: None)
    assert table.advance([7, 8, 9]) == 0
    assert table.identities == [1, 2, 3, 7, 8, 9]
    assert table.tensor(torch.device("cpu")).tolist() == table.pages


def test_a_copy_that_fails_takes_no_page() -> None:
    pool = PagePool(8)
    parent = BlockTable(pool, PAGE)
    parent.reserve(6, lambda source, target: None)
    parent.advance([1] * 6)
    child = parent.fork()

    def fail(source: int, target: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        child.reserve(20, fail)
    assert pool.used == 2
    assert child.pages == parent.pages
    child.release()
    parent.release()
    assert pool.used == 0
