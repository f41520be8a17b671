"""`DiskStore`: pages that outlive the process, by key; several processes may use one folder at the same time.

An SQLite index (WAL) says which pages there are, what they would cost to compute, and who pinned them; each page is a
file of its own, written under a temporary name and renamed inside the transaction that enters it. A page whose file is
gone, cut or changed is dropped when it is read. The index can be lost: it is made anew from the files.

Recency is counted, not timed, so no clock can make a page immortal or evict it: a page's value is what it costs to
compute on top of the value of what was evicted last (GreedyDual), and each use renews it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from m3agent.errors import CacheError
from m3agent.runtime.kv.page_file import DamagedPage, page_bytes, read_page
from m3agent.runtime.kv.store_index import DamagedIndex, StoreIndex, number

PINNED_SHARE = 0.5  # of the limit: what sessions can hold on to, so that there is always room to evict
LEAVES = """
SELECT key, size, value FROM pages AS page
WHERE NOT EXISTS (SELECT 1 FROM pages WHERE parent = page.key) AND NOT EXISTS (SELECT 1 FROM pins WHERE key = page.key)
ORDER BY value LIMIT 256
"""


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


@dataclass(frozen=True)
class StoredPage:
    """size: bytes of its file."""

    key: bytes
    parent: bytes
    size: int
    pinned: bool


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
        self._index = StoreIndex(self.folder)
        self._stats = StoreStats(str(folder))
        self._unseen = limit or 0  # bytes written since the sizes were added up; how many others wrote, nobody knows
        try:
            (self.folder / "pages").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"the cache folder {self.folder} cannot be made: {error}") from None
        self._sweep()
        self._index.do(lambda database: None)

    def has(self, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on without a gap, are there."""

        def ask(database: sqlite3.Connection) -> int:
            for place, key in enumerate(keys):
                if not _known(database, key):
                    return place
            return len(keys)

        return self._index.do(ask)

    def put(self, key: bytes, parent: bytes, payload: Mapping[str, Tensor], cost: float = 1.0) -> bool:
        """Store a page; False when it cannot be written (`stat` says why). A page that is there stays as it is."""
        path = self._path(key)
        content = b""

        def enter(database: sqlite3.Connection) -> None:
            if temporary.exists():  # not when the index was replaced, and this is done a second time
                temporary.rename(path)
            row = (key, parent, path.stat().st_size, cost, _floor(database) + cost)
            database.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?)", row)

        try:
            if self.has([key]):
                return True
            content = page_bytes(key, parent, payload)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with _temporary(path, content) as temporary:
                self._index.do(enter, write=True)
        except (OSError, CacheError) as error:
            self._stats.failed_writes += 1
            self._stats.last_failure = str(error)
            self._discard(key)
            return False
        self._stats.writes += 1
        self._unseen += len(content)
        if self.limit is not None and self._unseen > self.limit // 16:
            self.gc()
        return True

    def get(self, key: bytes, names: Iterable[str] | None = None) -> dict[str, Tensor] | None:
        """A page's parts, or only the named ones; None when it is not there, or not whole: then it is dropped."""
        try:
            if not self.has([key]):
                return None
            parts = read_page(self._path(key), key, names)
        except (FileNotFoundError, DamagedPage):
            self._check(key)
            return None
        except (
            OSError,
            CacheError,
        ) as error:  # of this process or machine, as too many open files: the page may be good
            self._stats.last_failure = str(error)
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
            self._index.do(renew, write=True)

    def drop(self, key: bytes) -> None:
        """Remove a page, whatever it is worth."""

        def remove(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM pages WHERE key = ?", (key,))
            self._path(key).unlink(missing_ok=True)

        with contextlib.suppress(OSError, CacheError):
            self._index.do(remove, write=True)

    def _check(self, key: bytes) -> bool:
        """Drop a page if it is damaged or has no file; whether it was. Nobody can write it while it is looked at."""

        def look(database: sqlite3.Connection) -> bool:
            if not _known(database, key):
                return False  # another process evicted it
            try:
                read_page(self._path(key), key)
                return False  # another process wrote it again
            except (FileNotFoundError, DamagedPage):
                database.execute("DELETE FROM pages WHERE key = ?", (key,))
                self._path(key).unlink(missing_ok=True)
                return True

        try:
            damaged = self._index.do(look, write=True)
        except (OSError, CacheError) as error:
            self._stats.last_failure = str(error)
            return False
        self._stats.damaged += damaged
        return damaged

    def _discard(self, key: bytes) -> bool:
        """Remove the file of a page that is not in the index, as one whose entry failed; whether there was one."""

        def remove(database: sqlite3.Connection) -> bool:
            if _known(database, key) or not self._path(key).exists():
                return False
            self._path(key).unlink(missing_ok=True)
            return True

        try:
            return self._index.do(remove, write=True)
        except (OSError, CacheError):
            return False

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

        self._index.do(enter, write=True)

    def unpin(self, name: str) -> None:
        self._index.do(lambda database: database.execute("DELETE FROM pins WHERE name = ?", (name,)), write=True)

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
                    _check_row(key, bytes_, value)
                    if size <= goal * 0.9:
                        break
                    database.execute("DELETE FROM pages WHERE key = ?", (key,))
                    database.execute("UPDATE floor SET value = max(value, ?)", (value,))
                    self._path(key).unlink(missing_ok=True)
                    size, gone = size - bytes_, gone + 1
            return gone

        try:
            gone = self._index.do(evict, write=True)
        except (OSError, CacheError) as error:
            self._stats.last_failure = str(error)
            return 0
        self._stats.evicted += gone
        return gone

    def stat(self) -> StoreStats:
        def ask(database: sqlite3.Connection) -> StoreStats:
            pages = int(number(database, "SELECT count(*) FROM pages"))
            names = [row[0] for row in database.execute("SELECT DISTINCT name FROM pins ORDER BY name")]
            values = {"pages": pages, "size": _size(database), "pinned": _pinned(database), "names": names}
            return StoreStats(**{**vars(self._stats), "limit": self.limit or 0, **values})

        return self._index.do(ask)

    def pages(self) -> list[StoredPage]:
        """All pages, the ones that would be evicted first at the beginning."""
        query = "SELECT key, parent, size, value, EXISTS (SELECT 1 FROM pins WHERE key = page.key) FROM pages AS page"

        def ask(database: sqlite3.Connection) -> list[StoredPage]:
            found: list[StoredPage] = []
            for key, parent, size, value, pinned in database.execute(f"{query} ORDER BY value"):
                _check_row(key, size, value)
                found.append(StoredPage(key, parent, size, bool(pinned)))
            return found

        return self._index.do(ask)

    def keys(self) -> list[bytes]:
        return [page.key for page in self.pages()]

    def verify(self) -> list[str]:
        """Read every page; what is damaged, without file or without index entry is removed and told, a line each."""
        told: list[str] = []
        for key in self.keys():
            try:
                read_page(self._path(key), key)
            except (FileNotFoundError, DamagedPage):
                if self._check(key):
                    told.append(f"{key.hex()}: damaged or without its file; removed")
            except OSError as error:
                told.append(f"{key.hex()}: cannot be read: {error.strerror or error}")
        for path in (self.folder / "pages").glob("*/*.safetensors"):
            key = _key(path)
            if key is None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    told.append(f"{path.name}: no name of a page; removed")
            elif not self.has([key]) and self._discard(key):
                told.append(f"{path.name}: not in the index; removed")
        return told

    def clear(self) -> None:
        """Remove every page and pin."""

        def remove(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM pages")
            database.execute("DELETE FROM pins")
            for path in (self.folder / "pages").glob("*/*.safetensors"):
                path.unlink(missing_ok=True)

        self._index.do(remove, write=True)

    def close(self) -> None:
        self._index.close()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / "pages" / name[:2] / f"{name}.safetensors"

    def _sweep(self) -> None:
        """Remove what writers that died left behind: nobody holds its lock."""
        for path in (self.folder / "pages").glob("*/*.tmp"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    """A file with this content beside `path`, locked, for renaming; what is still there at the end is removed."""
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            done = 0
            while done < len(content):
                done += file.write(memoryview(content)[done:])
            yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _floor(database: sqlite3.Connection) -> float:
    return number(database, "SELECT value FROM floor")


def _size(database: sqlite3.Connection) -> int:
    return int(number(database, "SELECT coalesce(sum(size), 0) FROM pages"))


def _pinned(database: sqlite3.Connection) -> int:
    query = "SELECT coalesce(sum(size), 0) FROM pages WHERE key IN (SELECT key FROM pins)"
    return int(number(database, query))


def _check_row(key: object, size: object, value: object) -> None:
    """Raises DamagedIndex: SQLite finds a bit that flipped in its tree, not one in a row."""
    if not isinstance(key, bytes) or not isinstance(size, int) or not isinstance(value, float):
        raise DamagedIndex("a row of wrong types")


def _known(database: sqlite3.Connection, key: bytes) -> bool:
    return database.execute("SELECT 1 FROM pages WHERE key = ?", (key,)).fetchone() is not None


def _key(path: Path) -> bytes | None:
    try:
        return bytes.fromhex(path.stem)
    except ValueError:
        return None
