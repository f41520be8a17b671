"""The index of a `DiskStore`: an SQLite database (WAL), made anew from the page files when it is lost or damaged."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from m3agent.errors import CacheError
from m3agent.runtime.kv.page_file import DamagedPage, read_parent

SCHEMA = 1
TABLES = """
CREATE TABLE pages (
    key BLOB PRIMARY KEY, parent BLOB NOT NULL, size INTEGER NOT NULL, cost REAL NOT NULL, value REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX pages_by_parent ON pages (parent);
CREATE INDEX pages_by_value ON pages (value);
CREATE TABLE pins (name TEXT NOT NULL, key BLOB NOT NULL, PRIMARY KEY (name, key)) WITHOUT ROWID;
CREATE INDEX pins_by_key ON pins (key);
CREATE TABLE floor (value REAL NOT NULL);
INSERT INTO floor VALUES (0);
"""
DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
T = TypeVar("T")


class DamagedIndex(Exception):
    """A row that nobody can have written."""


class StoreIndex:
    """The index in `folder`; for any thread and any process, forked too. Raises CacheError where it cannot be used.

    In a folder that cannot be written it is opened as it is, for reading alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "index.sqlite3"
        self._marker = folder / "index.rebuild"  # there while the index is set aside: do not trust what is there
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._process = os.getpid()
        self._inherited: list[object] = []

    def do(self, work: Callable[[sqlite3.Connection], T], write: bool = False) -> T:
        """Run `work` in one transaction; again where the index was set aside meanwhile or is found to be damaged."""
        if self._process != os.getpid():  # forked: a lock that nobody will open, a connection that is not to be closed
            self._inherited += [self._lock, self._database]
            self._process, self._lock, self._database = os.getpid(), threading.RLock(), None
        with self._lock:
            for attempt in range(3):
                database = None
                try:
                    database = self._connect()
                    result = _transaction(database, work, write)
                    if not write or self._inode == _inode(self._path):
                        return result
                except (sqlite3.DatabaseError, UnicodeError, DamagedIndex) as error:
                    failed = self._inode
                    self.close()
                    if not _is_damage(error):  # locked, full, read-only
                        raise CacheError(f"the cache's index in {self._folder} cannot be used: {error}") from None
                    if attempt == 2 or database is None or not os.access(self._folder, os.W_OK):
                        raise CacheError(f"the cache's index in {self._folder} is damaged: {error}") from None
                    self._connect(failed)
            raise CacheError(f"the cache's index in {self._folder} is replaced all the time")

    def close(self) -> None:
        with self._lock:
            if self._database is not None and self._process == os.getpid():
                self._database.close()
            self._database, self._inode = None, None

    def _connect(self, failed: int | None = None) -> sqlite3.Connection:
        """failed: the file that was found to be damaged, if it still is the index."""
        if self._database is not None and self._inode == _inode(self._path):
            return self._database
        self.close()
        if not os.access(self._folder, os.W_OK):
            log = self._path.with_name(self._path.name + "-wal")
            mode = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
            address = f"file:{self._quoted()}?{mode}"
            return self._keep(sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False))
        with self._alone():
            pins: list[tuple[str, bytes]] = []
            if self._marker.exists() or (failed is not None and failed == _inode(self._path)):
                pins = self._set_aside()
            try:
                return self._keep(self._open(pins))
            except (sqlite3.DatabaseError, UnicodeError) as error:
                if not _is_damage(error):
                    raise
                return self._keep(self._open(self._set_aside()))

    def _open(self, pins: list[tuple[str, bytes]]) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=10, isolation_level=None, check_same_thread=False)
        try:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA:
                raise CacheError(f"the cache in {self._folder} was made by a newer m3agent; use another folder")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            if version < SCHEMA:
                _transaction(database, lambda database: self._fill(database, pins), write=True)
            self._marker.unlink(missing_ok=True)
            return database
        except BaseException:
            database.close()
            raise

    def _fill(self, database: sqlite3.Connection, pins: list[tuple[str, bytes]]) -> None:
        """A new index, of all pages whose files are there. Reading them will check their sums."""
        for statement in TABLES.split(";"):
            database.execute(statement)
        for path in (self._folder / "pages").glob("*/*.safetensors"):
            with contextlib.suppress(OSError, DamagedPage):
                key, parent = read_parent(path)
                if path.stem == key.hex():
                    row = (key, parent, path.stat().st_size)
                    database.execute("INSERT OR IGNORE INTO pages VALUES (?, ?, ?, 1, 1)", row)
        database.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", pins)
        database.execute(f"PRAGMA user_version = {SCHEMA}")

    def _set_aside(self) -> list[tuple[str, bytes]]:
        """Move a damaged index out of the way; returns the pins that can be read in it."""
        pins: list[tuple[str, bytes]] = []
        with contextlib.suppress(sqlite3.Error, UnicodeError), contextlib.closing(sqlite3.connect(self._path)) as old:
            for name, key in old.execute("SELECT name, key FROM pins"):
                if isinstance(name, str) and isinstance(key, bytes):
                    pins.append((name, key))
        self._marker.touch()
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                path = self._path.with_name(self._path.name + suffix)
                path.rename(path.with_name(path.name + ".damaged"))
        return pins

    def _keep(self, database: sqlite3.Connection) -> sqlite3.Connection:
        self._database, self._inode = database, _inode(self._path)
        return database

    def _quoted(self) -> str:
        return str(self._path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time opens or replaces the index."""
        try:
            with (self._folder / "lock").open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise CacheError(f"the cache's index in {self._folder} cannot be used: {error}") from None


def number(database: sqlite3.Connection, query: str) -> float:
    """The one number that a query gives. Raises DamagedIndex where there is none."""
    row = database.execute(query).fetchone()
    if row is None or not isinstance(row[0], int | float):
        raise DamagedIndex("a number that is none")
    return row[0]


def _transaction(database: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], write: bool) -> T:
    database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
    try:
        result = work(database)
        database.execute("COMMIT")
        return result
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def _is_damage(error: Exception) -> bool:
    if not isinstance(error, sqlite3.OperationalError):
        return not isinstance(error, sqlite3.ProgrammingError)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF in DAMAGED or code == sqlite3.SQLITE_IOERR_SHORT_READ


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
