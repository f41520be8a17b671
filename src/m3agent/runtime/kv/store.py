"""`DiskStore`: pages that outlive the process, by key; several processes may use one folder at the same time.

An SQLite index (WAL) says which pages there are, what they would cost to compute, and who pinned them; each page is a
file of its own, written under a temporary name and renamed inside the transaction that enters it. A page whose file is
gone, cut or changed is dropped when it is read. The index can be lost: it is made anew from the files.

Recency is counted, not timed, so no clock can make a page immortal or evict it: a page's value is what it costs to
compute on top of the value of what was evicted last (GreedyDual), and each use renews it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from m3agent.errors import CacheError
from m3agent.runtime.kv.page_file import DamagedPage, page_bytes, read_page, read_parent

SCHEMA = 1
PINNED_SHARE = 0.5  # of the limit: what sessions can hold on to, so that there is always room to evict
TABLES = """
CREATE TABLE IF NOT EXISTS pages (
    key BLOB PRIMARY KEY, parent BLOB NOT NULL, size INTEGER NOT NULL, cost REAL NOT NULL, value REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pages_by_parent ON pages (parent);
CREATE INDEX IF NOT EXISTS pages_by_value ON pages (value);
CREATE TABLE IF NOT EXISTS pins (name TEXT NOT NULL, key BLOB NOT NULL, PRIMARY KEY (name, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pins_by_key ON pins (key);
CREATE TABLE IF NOT EXISTS floor (value REAL NOT NULL);
INSERT INTO floor SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM floor);
"""
LEAVES = """
SELECT key, size, value FROM pages AS page
WHERE NOT EXISTS (SELECT 1 FROM pages WHERE parent = page.key) AND NOT EXISTS (SELECT 1 FROM pins WHERE key = page.key)
ORDER BY value LIMIT 256
"""
T = TypeVar("T")


@dataclass
class StoreStats:
    """What is in a store, and what this process has done with it. Sizes in bytes."""

    folder: str
    pages: int = 0
    size: int = 0
    pinned: int = 0
    limit: int = 0
    reads: int = 0
    writes: int = 0
    evicted: int = 0
    damaged: int = 0
    failed_writes: int = 0
    last_failure: str | None = None
    names: list[str] = field(default_factory=list[str])  # under which pages are pinned


def cache_folder() -> Path:
    """Where pages go when no folder is named: $M3AGENT_CACHE, else m3agent/kv in the user's cache folder."""
    named = os.environ.get("M3AGENT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "m3agent" / "kv"


class DiskStore:
    """limit: bytes of payload files; None is no limit. Every method may be called from any thread and forked process.

    Raises CacheError for a folder that cannot be made or used.
    """

    def __init__(self, folder: str | Path, limit: int | None = None) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._process = 0
        self._stats = StoreStats(str(folder))
        self._unseen = 0  # bytes written since the sizes were added up
        try:
            (self.folder / "pages").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"the cache folder {self.folder} cannot be made: {error}") from None
        self._sweep()
        self._do(lambda database: None)

    def has(self, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on without a gap, are there."""

        def ask(database: sqlite3.Connection) -> int:
            for place, key in enumerate(keys):
                if database.execute("SELECT 1 FROM pages WHERE key = ?", (key,)).fetchone() is None:
                    return place
            return len(keys)

        return self._do(ask)

    def put(self, key: bytes, parent: bytes, payload: Mapping[str, Tensor], cost: float = 1.0) -> bool:
        """Store a page; False when it cannot be written (`stat` says why). A page that is there stays as it is."""
        if self.has([key]):
            return True
        path, temporary = self._path(key), self._path(key).with_name(f"{os.getpid()}-{uuid.uuid4().hex}.tmp")
        content = page_bytes(key, parent, payload)

        def enter(database: sqlite3.Connection) -> None:
            temporary.rename(path)
            value = _floor(database) + cost
            row = (key, parent, len(content), cost, value)
            database.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?)", row)

        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.write_bytes(content)
            self._do(enter, write=True)
        except (OSError, CacheError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._stats.failed_writes += 1
            self._stats.last_failure = str(error)
            return False
        self._stats.writes += 1
        self._unseen += len(content)
        if self.limit is not None and self._unseen > self.limit // 16:
            self.gc()
        return True

    def get(self, key: bytes, names: Iterable[str] | None = None) -> dict[str, Tensor] | None:
        """A page's parts, or only the named ones; None when it is not there, or not whole: then it is dropped."""
        if not self.has([key]):
            return None
        try:
            parts = read_page(self._path(key), key, names)
        except FileNotFoundError:
            self.drop(key)
            return None
        except (OSError, DamagedPage):
            self._stats.damaged += 1
            self.drop(key)
            return None
        self._stats.reads += 1
        return parts

    def touch(self, keys: Iterable[bytes]) -> None:
        """These pages are in use: they go last."""

        def renew(database: sqlite3.Connection) -> None:
            floor = _floor(database)
            rows = [(floor, key) for key in keys]
            database.executemany("UPDATE pages SET value = ? + cost WHERE key = ?", rows)

        with contextlib.suppress(CacheError):  # what is read-only can be read all the same
            self._do(renew, write=True)

    def drop(self, key: bytes) -> None:
        def remove(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM pages WHERE key = ?", (key,))
            self._path(key).unlink(missing_ok=True)

        with contextlib.suppress(OSError, CacheError):
            self._do(remove, write=True)

    def pin(self, name: str, keys: Iterable[bytes]) -> None:
        """Do not evict these pages while `name` is pinned; what it had pinned before is let go.

        Raises CacheError, and changes nothing, when pinned pages would take more than half of the store's limit.
        """

        def enter(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM pins WHERE name = ?", (name,))
            database.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", [(name, key) for key in keys])
            pinned = _pinned(database)
            if self.limit is not None and pinned > self.limit * PINNED_SHARE:
                raise CacheError(
                    f"{name!r} would bring the pinned pages to {pinned:,} bytes, over half of the cache's limit of "
                    f"{self.limit:,}; unpin another session, or give the cache more room"
                )

        self._do(enter, write=True)

    def unpin(self, name: str) -> None:
        self._do(lambda database: database.execute("DELETE FROM pins WHERE name = ?", (name,)), write=True)

    def gc(self) -> int:
        """Evict pages until the store is a tenth below its limit; returns how many went."""
        if self.limit is None:
            return 0
        goal = self.limit

        def evict(database: sqlite3.Connection) -> int:
            size, gone = _size(database), 0
            self._unseen = 0
            while size > goal * 0.9 and (leaves := database.execute(LEAVES).fetchall()):
                for key, bytes_, value in leaves:
                    if size <= goal * 0.9:
                        break
                    database.execute("DELETE FROM pages WHERE key = ?", (key,))
                    database.execute("UPDATE floor SET value = max(value, ?)", (value,))
                    self._path(key).unlink(missing_ok=True)
                    size, gone = size - bytes_, gone + 1
            return gone

        try:
            gone = self._do(evict, write=True)
        except (OSError, CacheError) as error:
            self._stats.last_failure = str(error)
            return 0
        self._stats.evicted += gone
        return gone

    def stat(self) -> StoreStats:
        def ask(database: sqlite3.Connection) -> StoreStats:
            pages = database.execute("SELECT count(*) FROM pages").fetchone()[0]
            names = [row[0] for row in database.execute("SELECT DISTINCT name FROM pins ORDER BY name")]
            values = {"pages": pages, "size": _size(database), "pinned": _pinned(database), "names": names}
            return StoreStats(**{**vars(self._stats), "limit": self.limit or 0, **values})

        return self._do(ask)

    def keys(self) -> list[bytes]:
        """All pages, the ones that would be evicted first at the beginning."""
        return self._do(lambda database: [row[0] for row in database.execute("SELECT key FROM pages ORDER BY value")])

    def verify(self) -> list[str]:
        """Read every page; what is damaged, without file or without index entry is removed and told, a line each."""
        damaged = [key for key in self.keys() if self.get(key) is None]
        told = [f"{key.hex()}: damaged or without its file; removed" for key in damaged]
        for path in (self.folder / "pages").glob("*/*.safetensors"):
            if not _known(path.stem, self):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                told.append(f"{path.name}: not in the index; removed")
        return told

    def clear(self) -> None:
        """Remove every page and pin."""

        def remove(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM pages")
            database.execute("DELETE FROM pins")
            for path in (self.folder / "pages").glob("*/*.safetensors"):
                path.unlink(missing_ok=True)

        self._do(remove, write=True)

    def close(self) -> None:
        with self._lock:
            if self._database is not None and self._process == os.getpid():
                self._database.close()
            self._database = None

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / "pages" / name[:2] / f"{name}.safetensors"

    def _do(self, work: Callable[[sqlite3.Connection], T], write: bool = False) -> T:
        """Run `work` on the index, in one transaction. A damaged index is made anew from the files, once."""
        with self._lock:
            for attempt in (1, 2):
                try:
                    database = self._connect()
                    database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                    try:
                        result = work(database)
                        database.execute("COMMIT")
                        return result
                    except BaseException:
                        with contextlib.suppress(sqlite3.Error):
                            database.execute("ROLLBACK")
                        raise
                except sqlite3.DatabaseError as error:
                    self.close()
                    missing = "no such" in str(error)  # a table or column, in an index that says it is complete
                    if isinstance(error, sqlite3.OperationalError) and not missing:  # locked, full, read-only
                        raise CacheError(f"the cache's index in {self.folder} cannot be used: {error}") from None
                    if attempt == 2:
                        raise CacheError(f"the cache's index in {self.folder} is damaged: {error}") from None
                    self._rebuild()
            raise AssertionError

    def _connect(self) -> sqlite3.Connection:
        if self._database is not None and self._process == os.getpid():
            return self._database
        database = sqlite3.connect(
            self.folder / "index.sqlite3", timeout=10, isolation_level=None, check_same_thread=False
        )
        try:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA:
                raise CacheError(f"the cache in {self.folder} was made by a newer m3agent; use another folder")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            if version < SCHEMA:
                database.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
        except BaseException:
            database.close()
            raise
        self._database, self._process = database, os.getpid()
        return database

    def _rebuild(self) -> None:
        """Set a damaged index aside and enter the pages that the files name. Reading them checks their sums."""
        index = self.folder / "index.sqlite3"
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                index.with_name(index.name + suffix).rename(index.with_name(index.name + suffix + ".damaged"))
        rows: list[tuple[bytes, bytes, int]] = []
        for path in (self.folder / "pages").glob("*/*.safetensors"):
            try:
                key, parent = read_parent(path)
                if path.stem == key.hex():
                    rows.append((key, parent, path.stat().st_size))
            except (OSError, DamagedPage):
                continue
        database = self._connect()
        database.executemany("INSERT OR IGNORE INTO pages VALUES (?, ?, ?, 1, 1)", rows)

    def _sweep(self) -> None:
        """Remove what writers that died left behind."""
        for path in (self.folder / "pages").glob("*/*.tmp"):
            with contextlib.suppress(OSError, ValueError):
                if not _alive(int(path.name.split("-")[0])):
                    path.unlink(missing_ok=True)


def _floor(database: sqlite3.Connection) -> float:
    return database.execute("SELECT value FROM floor").fetchone()[0]


def _size(database: sqlite3.Connection) -> int:
    return database.execute("SELECT coalesce(sum(size), 0) FROM pages").fetchone()[0]


def _pinned(database: sqlite3.Connection) -> int:
    query = "SELECT coalesce(sum(size), 0) FROM pages WHERE key IN (SELECT key FROM pins)"
    return database.execute(query).fetchone()[0]


def _known(name: str, store: DiskStore) -> bool:
    try:
        return store.has([bytes.fromhex(name)]) == 1
    except ValueError:
        return False


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
