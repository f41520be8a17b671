"""The cache as a whole: who comes with known tokens finds their pages, and never a page with anything else in it."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from m3agent.errors import ContextOverflow
from m3agent.runtime.kv import BlockTable, KVCache
from m3agent.runtime.kv.keys import Identity, Pixels, page_key, root_key

PAGE = 4


@dataclass
class Memory:
    """Stands for the tensors: what was written to each page is the whole past of a token, as attention mixes it in."""

    pages: int
    block_size: int = PAGE
    content: list[list[tuple[Identity, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.content = [[()] * PAGE for _ in range(self.pages)]

    def copy_page(self, source: int, target: int) -> None:
        self.content[target] = list(self.content[source])


def find(cache: KVCache, table: BlockTable, ahead: list[Identity]) -> int:
    whole = cache.find(table, ahead)
    return whole + cache.find_part(table, ahead[whole:])


def write(cache: KVCache, memory: Memory, table: BlockTable, tokens: list[Identity]) -> None:
    """What the engine does with pending tokens."""
    past = table.identities
    cache.reserve(table, table.cached + len(tokens))
    for offset, _ in enumerate(tokens):
        position = table.cached + offset
        page = table.pages[position // PAGE]
        assert cache.pool.references(page) == 1, "a shared page is written to"
        memory.content[page][position % PAGE] = tuple(past + tokens[: offset + 1])
    cache.advance(table, tokens)


class Programs(RuleBasedStateMachine):
    """Sequences over few kinds of tokens, so that beginnings repeat, on few pages, so that room must be made."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(10)
        self.tables: list[BlockTable] = []
        self.logs: list[list[Identity]] = []
        self.working: BlockTable | None = None
        self.cache = KVCache(self.memory, b"root", self.relax)  # type: ignore[arg-type]

    def relax(self) -> bool:
        for table in self.tables:
            if table.pages and table is not self.working:
                table.release()
                return True
        return False

    @precondition(lambda self: len(self.tables) < 5)
    @rule()
    def open(self) -> None:
        self.tables.append(self.cache.new_table())
        self.logs.append([])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), new=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def turn(self, which: int, new: list[Identity]) -> None:
        table, log = self.tables[which % len(self.tables)], self.logs[which % len(self.tables)]
        log += new
        self.working = table
        ahead = log[table.cached :]
        found = find(self.cache, table, ahead)
        assert found < len(ahead)
        try:
            write(self.cache, self.memory, table, ahead[found:])
        except ContextOverflow:
            assert len(log) > PAGE * self.memory.pages
        self.cache.settle(table)
        self.working = None

    @precondition(lambda self: 0 < len(self.tables) < 5)
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
    def every_sequence_reads_its_own_past(self) -> None:
        for table, log in zip(self.tables, self.logs, strict=True):
            assert table.identities == log[: table.cached]
            for position in range(table.cached):
                page = table.pages[position // PAGE]
                assert self.memory.content[page][position % PAGE] == tuple(log[: position + 1])

    @invariant()
    def pages_are_counted(self) -> None:
        pool = self.cache.pool
        held = {page for table in self.tables for page in table.pages}
        assert pool.used == len(held)
        assert pool.cached == sum(not pool.references(page) for page in self.cache.index._by_page)
        assert pool.used + pool.cached + pool.free == pool.total

    def teardown(self) -> None:
        for table in self.tables:
            table.release()
        for _ in self.cache.index.evict(99):
            pass
        assert self.cache.pool.free == self.cache.pool.total
        assert len(self.cache.index) == 0
        assert not self.cache.index._roots


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.fixture
def memory() -> Memory:
    return Memory(8)


@pytest.fixture
def cache(memory: Memory) -> KVCache:
    return KVCache(memory, b"root", lambda: False)  # type: ignore[arg-type,misc]


def test_a_second_prompt_takes_over_whole_pages_and_a_part_of_the_next(cache: KVCache, memory: Memory) -> None:
    first, second = cache.new_table(), cache.new_table()
    write(cache, memory, first, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.settle(first)
    assert find(cache, second, [1, 2, 3, 4, 5, 6, 7, 7, 7]) == 7
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] not in first.pages
    third = cache.new_table()
    assert find(cache, third, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]) == 9
    assert third.pages[:2] == first.pages[:2]
    assert cache.pool.used == 5
    for table in (first, second, third):
        table.release()
    assert (cache.pool.used, cache.pool.cached) == (0, 3)


def test_a_whole_prompt_that_is_known_leaves_its_last_token_to_compute(cache: KVCache, memory: Memory) -> None:
    first, second = cache.new_table(), cache.new_table()
    write(cache, memory, first, [1, 2, 3, 4])
    assert find(cache, second, [1, 2, 3, 4]) == 3


def test_pictures_of_equal_size_and_other_content_share_nothing(cache: KVCache, memory: Memory) -> None:
    def prompt(digest: str) -> list[Identity]:
        return [1, *[Pixels(9, digest, 0, row) for row in range(4)], 2, 3, 4, 5]

    first, same, other = (cache.new_table() for _ in range(3))
    write(cache, memory, first, prompt("a"))
    assert find(cache, same, prompt("a")) == 8
    assert find(cache, other, prompt("b")) == 1


def test_every_part_of_a_key_counts() -> None:
    roots = {root_key(*parts) for parts in (("a", "float32", 8), ("b", "float32", 8), ("a", "float16", 8))}
    assert len(roots) == 3
    chunks: list[list[Identity]] = [
        [1, 2],
        [2, 1],
        [1, Pixels(9, "a", 0, 0)],
        [1, Pixels(9, "a", 0, 1)],
        [1, Pixels(9, "a", 1, 0)],
        [1, Pixels(9, "b", 0, 0)],
        [Pixels(9, "a", 0, 0), 1],
    ]
    assert len({page_key(root, chunk) for root in roots for chunk in chunks}) == 3 * len(chunks)


def test_what_was_used_last_and_what_others_stand_on_stays(cache: KVCache, memory: Memory) -> None:
    old, new = cache.new_table(), cache.new_table()
    write(cache, memory, old, [1] * 12)
    write(cache, memory, new, [2] * 12)
    old.release()
    new.release()
    assert find(cache, cache.new_table(), [1] * 12) == 11  # used again, and the table held on to by nobody
    large = cache.new_table()
    write(cache, memory, large, [3] * 16)
    assert find(cache, cache.new_table(), [1] * 9) == 8
    assert find(cache, cache.new_table(), [2] * 9) < 8
