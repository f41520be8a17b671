"""All files beneath a directory, by descriptors: no link is followed, and none put there meanwhile can be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from m3agent.tools.workspace.beneath import Place

SKIPPED = frozenset({".git", ".hg", ".svn", ".venv", "node_modules", "__pycache__"})
MAX_DEPTH = 60  # each level holds a descriptor


@dataclass(frozen=True)
class Entry:
    """One name in a directory."""

    name: str
    kind: str  # "directory", "file", "link", "other"
    size: int


def entries(directory: int) -> list[Entry]:
    """What stands in an open directory, by name."""
    with os.scandir(directory) as found:
        return sorted((_entry(item) for item in found), key=lambda entry: entry.name)


def files(directory: int, prefix: str, stop: Callable[[], bool]) -> Iterator[Place]:
    """Files and links beneath `directory`; a place is good until the next one is asked for.

    `prefix` is the directory's own path. Directories in SKIPPED are left out. Ends early once `stop` says so.
    """
    try:
        found = entries(directory)
    except OSError:
        return  # gone meanwhile, or not ours to read
    for entry in found:
        if stop():
            return
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.kind in ("file", "link"):
            yield Place(directory, entry.name, path)
        elif entry.kind == "directory" and entry.name not in SKIPPED and path.count("/") < MAX_DEPTH:
            try:
                inner = Place(directory, entry.name, path).open(os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                yield from files(inner, path, stop)
            finally:
                os.close(inner)


def _entry(item: os.DirEntry[str]) -> Entry:
    if item.is_symlink():
        return Entry(item.name, "link", 0)
    if item.is_dir(follow_symlinks=False):
        return Entry(item.name, "directory", 0)
    try:
        size = item.stat(follow_symlinks=False).st_size
    except OSError:
        size = 0
    return Entry(item.name, "file" if item.is_file(follow_symlinks=False) else "other", size)
