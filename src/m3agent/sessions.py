"""`Sessions`: a folder of sessions by name, which outlive the process: saved after every turn, and taken up again."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote

import anyio
import anyio.to_thread

from m3agent.agent import Agent
from m3agent.errors import SessionBusy, SessionFileError
from m3agent.history import History
from m3agent.session import Session
from m3agent.session_file import write

try:
    import fcntl
except ImportError:  # not on Windows, where nobody keeps two processes from one session
    fcntl = None

SUFFIX = ".m3session"


@dataclass(frozen=True)
class SavedSession:
    """What a folder knows of a session. saved: when it was, in seconds since 1970; size: of its file, in bytes."""

    name: str
    saved: float
    size: int


class Sessions:
    """`sessions = Sessions("folder")`; `async with sessions.open(agent, "alice") as session: …`, today and tomorrow.

    Args:
        folder: where the files are; it is made when it is needed.
        ttl: seconds after its last turn for which a session is kept, None for ever.
        pages: save the pages of the KV cache, too. Without them, and without the runtime's `disk_cache` (which keeps
            those of all sessions once), a session that is taken up computes its tokens again.
    """

    def __init__(self, folder: str | os.PathLike[str], *, ttl: float | None = None, pages: bool = False) -> None:
        if ttl is not None and ttl <= 0:
            raise ValueError(f"ttl is {ttl}; it has to be more than 0 seconds")
        self.folder = Path(folder)
        self.ttl = ttl
        self.pages = pages

    @asynccontextmanager
    async def open(self, agent: Agent, name: str) -> AsyncIterator[Session]:
        """The session of this name, or a new one. It is saved after every turn of the model, after the results of its
        calls, and at the end of the block, so whatever ends the process, all but the running turn is there; calls that
        have no result yet are `session.pending`.

        Raises SessionBusy where the session is open already, in this process or another one; SessionFileError;
        ValueError for a name that is empty or longer than 180 bytes.
        """
        path = self._path(name)
        lock = await anyio.to_thread.run_sync(_locked, path)
        try:
            await anyio.to_thread.run_sync(self.expire)

            async def keep(history: History) -> None:
                await write(path, history, self.pages)

            found = path.exists()
            session = await agent.restore(path, name=name) if found else agent.session(name=name)
            session.keep(keep)
            try:
                async with session:
                    try:
                        yield session
                    finally:
                        with anyio.CancelScope(shield=True):
                            await session.save(path, pages=self.pages)
            finally:
                session.keep(None)
        finally:
            lock.close()

    def names(self) -> list[SavedSession]:
        """All that are kept, by name."""
        self.expire()
        found: list[SavedSession] = []
        for path in self._files():
            with suppress(FileNotFoundError):  # another process deletes, too
                stat = path.stat()
                found.append(SavedSession(unquote(path.name.removesuffix(SUFFIX)), stat.st_mtime, stat.st_size))
        return sorted(found, key=lambda each: each.name)

    def delete(self, name: str) -> bool:
        """Whether there was one. Raises SessionBusy while it is open."""
        path = self._path(name)
        with _locked(path):
            found = path.exists()
            path.unlink(missing_ok=True)
        return found

    def expire(self) -> None:
        """Delete those whose time is over, unless they are open."""
        if self.ttl is None:
            return
        for path in self._files():
            with suppress(FileNotFoundError, SessionBusy):
                if path.stat().st_mtime < time.time() - self.ttl:
                    with _locked(path):
                        path.unlink()

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob(f"*{SUFFIX}") if not path.name.startswith(".")]

    def _path(self, name: str) -> Path:
        file = quote(name, safe=" ").replace(".", "%2E")
        if not name or len(file) > 180:
            problem = f"a session's name has 1 to 180 bytes, special characters counted three times: {name!r}"
            raise ValueError(problem)
        return self.folder / f"{file}{SUFFIX}"


def _locked(path: Path) -> IO[bytes]:
    """Hold a session until the file that is returned is closed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("ab")
    except OSError as error:
        raise SessionFileError(f"{path}: the folder cannot be used ({error.strerror or error})") from error
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise SessionBusy(f"{path}: this session is open already") from None
    return lock
