"""Reading media files: regular files only, with a limit, and an error that names the file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from m3agent.errors import MediaError


def read_file(path: Path, limit: int, error: type[MediaError]) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; raises `error` with a message that names the file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path}: not a regular file")
            if status.st_size > limit:
                raise error(f"{path}: {status.st_size} bytes is over the limit of {limit}")
            return file.read()
    except (OSError, ValueError) as problem:
        hint = "; only local files are read, download it first" if "://" in str(path) or ":/" in str(path) else ""
        raise error(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}{hint}") from None


def _without_waiting(name: str, flags: int) -> int:
    """A named pipe without a writer would otherwise be waited for, in a thread that nothing can cancel."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
