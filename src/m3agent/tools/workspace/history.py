"""What a workspace's tools changed since it was made: for `undo`, step by step, and for `diff`, as a whole."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from m3agent.errors import ToolError
from m3agent.tools.workspace.encoding import decode
from m3agent.tools.workspace.lines import split_lines
from m3agent.tools.workspace.shown import printable

MAX_STEPS = 20  # changes of one file that can be undone; its first bytes are kept in any case


@dataclass
class Changes:
    """One file. Bytes are None where the file did not exist."""

    original: bytes | None
    earlier: list[bytes | None] = field(default_factory=list[bytes | None])
    latest: bytes | None = None


class History:
    """Changes by path from the root, links followed. Kept in memory, so that nothing is put into the folder."""

    def __init__(self) -> None:
        self._files: dict[str, Changes] = {}

    @property
    def paths(self) -> list[str]:
        return sorted(self._files)

    def record(self, path: str, before: bytes | None, after: bytes | None) -> None:
        """Note a change that was just made."""
        changes = self._files.setdefault(path, Changes(before))
        changes.earlier = [*changes.earlier, before][-MAX_STEPS:]
        changes.latest = after

    def previous(self, path: str, now: bytes | None) -> bytes | None:
        """The bytes before the last change. Raises ToolError when there is none, or when `now` is not its result."""
        changes = self._files.get(path)
        if changes is None or not changes.earlier:
            raise ToolError(f"There is no change of {path!r} to undo. Changed: {', '.join(self.paths) or 'nothing'}.")
        if changes.latest != now:
            raise ToolError(f"{path!r} was changed by something else since the last change here; it is not undone.")
        return changes.earlier[-1]

    def undone(self, path: str) -> None:
        """Note that the last change was taken back."""
        changes = self._files[path]
        changes.latest = changes.earlier.pop()

    def original(self, path: str) -> bytes | None:
        return self._files[path].original


def unified_diff(path: str, before: bytes | None, after: bytes | None) -> str:
    """The difference as a unified diff of lines; "" for none. Line endings and byte order marks are not shown."""
    if before == after:
        return ""
    old, new = _lines(before), _lines(after)
    name = printable(path)
    names = (name if before is not None else "/dev/null", name if after is not None else "/dev/null")
    if old is None or new is None:
        return f"--- {names[0]}\n+++ {names[1]}\n(binary)\n"
    text = "\n".join(line.rstrip("\n") for line in difflib.unified_diff(old, new, *names, lineterm=""))
    return text + "\n" if text else f"--- {names[0]}\n+++ {names[1]}\n(line endings or encoding alone)\n"


def _lines(data: bytes | None) -> list[str] | None:
    if data is None:
        return []
    text = decode(data)
    return None if text is None else split_lines(text.shown(text.text))
