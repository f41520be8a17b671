"""The disk store alone: never a wrong page, every page that was stored is served or dropped, whatever is damaged."""

import contextlib
import errno
import json
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from safetensors.torch import load_file

from m3agent.errors import CacheError
from m3agent.runtime.kv import page_file
from m3agent.runtime.kv.page_file import DamagedPage, page_bytes, read_page
from m3agent.runtime.kv.store import DiskStore
from m3agent.runtime.kv.store_index import StoreIndex
from tests.runtime.pages import check, key, payload, put

SIZE = len(page_bytes(key(0), key(-1), payload(0)))
NUMBERS = st.integers(0, 11)


class Programs(RuleBasedStateMachine):
    """Two stores on one folder against a dict: what is there is right, what is pinned stays, the limit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.stores = [self.open(), self.open()]
        self.stored: set[int] = set()
        self.pinned: dict[str, set[int]] = {}

    def open(self) -> DiskStore:
        return DiskStore(self.folder, 8 * SIZE + SIZE // 2)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)

    @rule(number=NUMBERS, which=st.integers(0, 1), cost=st.floats(0.1, 10))
    def put(self, number: int, which: int, cost: float) -> None:
        assert put(self.stores[which], number, number - 1, cost)
        self.stored.add(number)

    @rule(number=NUMBERS, which=st.integers(0, 1))
    def get(self, number: int, which: int) -> None:
        found = self.stores[which].get(key(number))
        if found is not None:
            assert number in self.stored
            check(found, number)
        assert found is not None or number not in set().union(*self.pinned.values())

    @rule(numbers=st.sets(NUMBERS, max_size=4), name=st.sampled_from("ab"), which=st.integers(0, 1))
    def pin(self, numbers: set[int], name: str, which: int) -> None:
        store = self.stores[which]
        there = {number for number in numbers if store.has([key(number)])}
        with contextlib.suppress(CacheError):  # over half of the limit
            store.pin(name, [key(number) for number in there])
            self.pinned[name] = there

    @rule(name=st.sampled_from("ab"))
    def unpin(self, name: str) -> None:
        self.stores[0].unpin(name)
        self.pinned.pop(name, None)

    @rule(numbers=st.sets(NUMBERS), which=st.integers(0, 1))
    def touch(self, numbers: set[int], which: int) -> None:
        self.stores[which].touch([key(number) for number in numbers])

    @rule(which=st.integers(0, 1))
    def gc(self, which: int) -> None:
        self.stores[which].gc()

    @rule(number=NUMBERS)
    def lose_a_file(self, number: int) -> None:
        self.stores[0]._path(key(number)).unlink(missing_ok=True)
        self.pinned = {name: numbers - {number} for name, numbers in self.pinned.items()}

    @rule()
    def lose_the_index(self) -> None:
        for path in Path(self.folder).glob("index.sqlite3*"):
            path.unlink()
        self.pinned = {}

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.open()

    @rule()
    def verify(self) -> None:
        self.stores[0].verify()
        files = {path.stem for path in Path(self.folder).glob("pages/*/*")}
        assert files == {found.hex() for found in self.stores[1].keys()}  # noqa: SIM118

    @invariant()
    def the_limit_holds(self) -> None:
        assert self.stores[0].stat().size <= 8 * SIZE + SIZE // 2


def test_random_programs_on_two_stores_of_one_folder() -> None:
    machine = Programs.TestCase
    machine.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
    machine().runTest()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path)
    for number in range(8):
        assert put(store, number, number - 1)
    store.close()
    return tmp_path


def test_page_files_are_safetensors_in_the_order_of_the_parts(filled: Path) -> None:
    path = DiskStore(filled)._path(key(3))
    loaded = load_file(path)
    check({name: loaded[name] for name in payload(3)}, 3)
    header = json.loads(path.read_bytes()[8:][: int.from_bytes(path.read_bytes()[:8], "little")])
    assert [name for name in header if name != "__metadata__"] == ["ik", "full", "kv.1"]


def test_every_flipped_bit_and_every_cut_of_a_page_file_is_found(tmp_path: Path) -> None:
    path, whole = tmp_path / "page", page_bytes(key(3), key(2), payload(3, 30))
    begin = 8 + int.from_bytes(whole[:8], "little")
    expected = payload(3, 30)
    for place in [*range(begin), *range(begin, len(whole), 7)]:
        for bit in range(8) if place < 8 else (place % 8, (place + 5) % 8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                found = read_page(path, key(3))
            except DamagedPage:
                continue
            assert {name: part.tolist() for name, part in found.items()} == {n: p.tolist() for n, p in expected.items()}
            assert list(map(chr, (whole[place], changed[place]))) in ([" ", c] for c in "\t\r\n"), "a change was missed"
    for size in range(0, len(whole), 5):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedPage):
            read_page(path, key(3))


def sealed(header: object) -> bytes:
    """A file whose header has the right checksum: who writes one on purpose can do that."""
    if isinstance(header, dict) and isinstance(meta := header.get("__metadata__"), dict):
        meta.setdefault("header", page_file._seal(header))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def hostile() -> Iterator[bytes]:
    zeros = zlib.crc32(bytes(64))
    entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    for change in (
        {"shape": [1 << 62, 4]}, {"shape": [-4, -4]}, {"shape": []}, {"shape": [0]}, {"shape": None},
        {"shape": [1e999]}, {"shape": [4, 4.5e300]}, {"shape": "16"}, {"shape": [[16]]}, {"shape": [1 << 40]},
        {"data_offsets": [-64, 0]}, {"data_offsets": [64, 0]}, {"data_offsets": [0, 1 << 70]}, {"data_offsets": [0]},
        {"data_offsets": 5}, {"data_offsets": [0, 1e999]}, {"data_offsets": [1 << 63, (1 << 63) + 64]},
        {"dtype": "F64"}, {"dtype": ["F32"]}, {"dtype": None},
        {"shape": [1 << 40], "data_offsets": [0, 1 << 42]}, {"shape": [8, 4], "data_offsets": [32, 160]},
    ):  # fmt: skip
        meta = {"version": page_file.VERSION, "key": key(3).hex(), "parent": key(2).hex()}
        yield sealed({"__metadata__": {**meta, "checksums": json.dumps({"ik": zeros})}, "ik": {**entry, **change}})
    for meta in (
        None, [], "x", {}, {"version": 1}, {"version": page_file.VERSION, "key": 5},
        {"version": page_file.VERSION, "key": key(3).hex(), "parent": "no hex", "checksums": "[" * 100_000},
        {"version": page_file.VERSION, "key": key(3).hex(), "parent": None, "checksums": '{"ik": "9"}'},
        {"version": "m3agent page 9", "key": key(3).hex(), "parent": "", "checksums": json.dumps({"ik": zeros})},
    ):  # fmt: skip
        yield sealed({"__metadata__": meta, "ik": entry})
    for text in (b"[" * 500_000, b"{}", b"[]", b"null", b"5" * 9000, b'{"a":' * 50_000, b"\xff\xfe", b"NaN", b""):
        yield sealed(text)
    yield from (b"", b"\xff" * 8, b"\xff" * 100, (1 << 63).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{")


def test_hostile_headers_are_damaged_pages(filled: Path) -> None:
    store = DiskStore(filled)
    path = store._path(key(3))
    for count, content in enumerate(hostile(), 1):
        path.write_bytes(content)
        assert store.get(key(3)) is None, content[:300]
        assert store.stat().damaged == count
        assert not path.exists()
        path.write_bytes(content)
        (filled / "index.sqlite3").unlink()  # made anew with such a file there
        assert store.get(key(3)) is None
        store._discard(key(3))
        put(store, 3, 2)
        check(store.get(key(3)), 3)
        store._stats.damaged = count
    for number in range(8):
        check(store.get(key(number)), number)


def test_reads_and_writes_that_give_less_at_a_time(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, to, offset: preadv(file, [to[0][:7]], offset))
    check(DiskStore(filled).get(key(3)), 3)


INDEX = "index.sqlite3"


@pytest.mark.parametrize("kind", ["gone", "garbage", "empty", "cut", "other", "text", "wal garbage", "no tables"])
def test_a_lost_or_damaged_index_is_made_anew(filled: Path, kind: str) -> None:
    store = DiskStore(filled, 1 << 20)
    store.pin("session", [key(1), key(2)])
    path = filled / INDEX
    if kind == "gone":
        path.unlink()
    elif kind == "wal garbage":
        (filled / f"{INDEX}-wal").write_bytes(random.Random(0).randbytes(5000))
    elif kind == "no tables":
        with sqlite3.connect(path) as database:
            database.execute("DROP TABLE pages")
        database.close()
    else:
        store.close()
        other = b"SQLite format 3\0" + bytes(5000)
        path.write_bytes(
            {"empty": b"", "cut": path.read_bytes()[:5000], "other": other}.get(kind, b"no database" * 999)
        )
    for _ in range(2):
        again = DiskStore(filled, 1 << 20)
        assert again.has([key(number) for number in range(8)]) == 8
        for number in range(8):
            check(again.get(key(number)), number)
        assert again.verify() == []
        if kind == "no tables":
            assert again.stat().names == ["session"]
        again.close()
    check(store.get(key(5)), 5)  # who had it open goes on with the new one
    assert put(store, 8, 7)
    check(DiskStore(filled).get(key(8)), 8)


def test_flipped_bits_anywhere_in_the_index_lose_nothing_but_time(filled: Path) -> None:
    files = {path: path.read_bytes() for path in filled.glob(f"{INDEX}*")}
    pages = {path: path.read_bytes() for path in filled.glob("pages/*/*")}
    chance = random.Random(5)
    for _ in range(150):
        for path in filled.glob("index.*"):
            path.unlink()
        for path, content in {**files, **pages}.items():
            path.write_bytes(content)
        changed = bytearray(files[filled / INDEX])
        for _ in range(chance.choice((1, 1, 30))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        (filled / INDEX).write_bytes(changed)
        try:
            store = DiskStore(filled, 5 * SIZE)
            for number in range(8):
                if (found := store.get(key(number))) is not None:
                    check(found, number)
            store.stat(), store.pages(), store.gc(), store.verify()
            assert put(store, 9)
            if (found := store.get(key(9))) is not None:  # with a flipped floor or size it can be the first to go
                check(found, 9)
        except CacheError as error:
            assert "newer m3agent" in str(error)  # noqa: PT017
        store.close()


def test_a_store_of_a_newer_version_is_refused_and_stays_as_it_is(filled: Path) -> None:
    with sqlite3.connect(filled / INDEX) as database:
        database.execute("PRAGMA user_version = 2")
    database.close()
    with pytest.raises(CacheError, match="made by a newer m3agent; use another folder"):
        DiskStore(filled)
    assert len(list(filled.glob("pages/*/*.safetensors"))) == 8


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounts")
def test_a_disk_that_is_really_full_and_one_that_is_read_only(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        store = DiskStore(tmp_path)
        stored = [number for number in range(250) if put(store, number)]
        assert 20 < len(stored) < 250
        assert store.stat().failed_writes == 250 - len(stored)
        for number in stored:
            check(store.get(key(number)), number)
        assert len(list(tmp_path.glob("pages/*/*"))) == len(stored)
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        store = DiskStore(tmp_path, 1000)
        for number in stored:
            check(store.get(key(number)), number)
        assert not put(store, 999)
        assert store.gc() == 0
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("call", ["mkdir", "open", "rename", "write", "commit"])
def test_a_call_that_fails_stores_nothing_and_leaves_nothing(
    filled: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(filled)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_index(self: StoreIndex, work: object, write: bool = False) -> object:
        if write:
            raise CacheError("database or disk is full")
        return do(self, work, write)  # type: ignore[arg-type]

    do = StoreIndex.do
    with monkeypatch.context() as patch:
        if call == "commit":
            patch.setattr(StoreIndex, "do", full_index)
        elif call == "write":
            patch.setattr("m3agent.runtime.kv.store.memoryview", full, raising=False)
        else:
            patch.setattr(Path, call, full)
        assert not put(store, 77)
        assert store.stat().failed_writes == 1
    assert not list(filled.glob("pages/*/*.tmp"))
    assert put(store, 77)
    assert store.verify() == []


def test_too_many_open_files_do_not_cost_a_page(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(filled)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("m3agent.runtime.kv.store.read_page", fail)
        assert store.get(key(3)) is None
    check(store.get(key(3)), 3)


def test_the_limit_holds_for_many_short_lives(tmp_path: Path) -> None:
    for number in range(40):
        store = DiskStore(tmp_path, 20 * SIZE)
        put(store, number)
        store.close()
    assert 15 * SIZE < DiskStore(tmp_path).stat().size <= 20 * SIZE


def test_a_clock_that_jumps_changes_nothing(filled: Path) -> None:
    for number, path in enumerate(sorted(filled.glob("pages/*/*"))):
        os.utime(path, (number * 10**9, 4 * 10**9 - number * 10**9))
    store = DiskStore(filled, 8 * SIZE)
    store.touch([key(7), key(0)])
    assert store.gc() > 0
    check(store.get(key(0)), 0)  # the first of a chain goes last


def test_what_a_dead_writer_left_is_removed_and_a_living_ones_is_not(filled: Path) -> None:
    import fcntl

    folder = next(filled.glob("pages/*"))
    (folder / "dead.tmp").write_bytes(b"x")
    with (folder / "alive.tmp").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        DiskStore(filled)
        assert [path.name for path in folder.glob("*.tmp")] == ["alive.tmp"]


def test_a_forked_process_uses_the_store_too(filled: Path) -> None:
    store = DiskStore(filled)
    check(store.get(key(1)), 1)
    child = os.fork()
    if child == 0:
        try:
            check(store.get(key(2)), 2)
            os._exit(0 if put(store, 20) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    check(store.get(key(20)), 20)
    assert put(store, 21)
    assert torch.is_tensor(store.get(key(21), ["ik"])["ik"])  # type: ignore[index]
