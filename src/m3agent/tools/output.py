"""What a program printed: bounded in memory, whole in a file when it is long, and clean text for the model."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
import weakref
from collections import deque
from pathlib import Path
from typing import BinaryIO

SHOWN_BYTES = 8_000  # of the beginning, and as much of the end
FILE_BYTES = 64 * 1024 * 1024  # of one output kept on disk
FILES = 8  # of these kept by one toolset

# Sequences that a terminal would act on (ECMA-48), also when the text was cut within one.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|\Z)"  # CSI: colours, cursor, queries
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|\Z|(?=\x1b))"  # OSC, DCS, SOS, PM
    r"|\x1b[ -/]*(?:[0-~]|\Z)"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Spool:
    """A folder for long outputs, made when it is first needed; it goes away with the toolset that owns it."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._files: deque[Path] = deque()
        self._numbers = itertools.count(1)

    @property
    def folder(self) -> Path | None:
        """Where the files are, once there is one."""
        return self._folder

    def open(self) -> BinaryIO:
        """A new file; the oldest beyond `FILES` is removed."""
        if self._folder is None or not self._folder.is_dir():
            self._folder = Path(tempfile.mkdtemp(prefix="m3agent-output-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        file = (self._folder / f"{next(self._numbers)}.txt").open("xb", buffering=0)
        self._files.append(Path(file.name))
        if len(self._files) > FILES:
            self._files.popleft().unlink(missing_ok=True)
        return file


class Output:
    """Collects what a program prints: the first and last `SHOWN_BYTES` in memory, everything longer in a file too."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._head = bytearray()
        self._tail = bytearray()
        self._bytes = self._newlines = 0
        self._file: BinaryIO | None = None
        self._written = 0
        self._room = FILE_BYTES  # nothing any more once the disk refused

    def add(self, data: bytes) -> None:
        self._bytes += len(data)
        self._newlines += data.count(b"\n")
        if self._file is None and self._bytes > 2 * SHOWN_BYTES:
            self.keep()
        self._write(data)
        room = SHOWN_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room else data
        if len(self._tail) > 16 * SHOWN_BYTES:
            del self._tail[:-SHOWN_BYTES]

    def keep(self) -> Path | None:
        """The file with the output, from now on; made here when there was none. None when it cannot be written."""
        if self._file is None and self._room:
            try:
                self._file = self._spool.open()
            except OSError:
                self._room = 0
            self._write(bytes(self._head + self._tail))  # complete: the tail is cut only once there is a file
        return Path(self._file.name) if self._file else None

    def _write(self, data: bytes) -> None:
        data = data[: self._room]
        try:
            while self._file is not None and data:
                written = self._file.write(data)
                self._written += written
                self._room -= written
                data = data[written:]
        except OSError:  # the program goes on; the model is told how much there is
            self._room = 0

    def close(self) -> None:
        """The file stays, closed."""
        if self._file is not None:
            self._file.close()

    def text(self) -> str:
        """Head and tail with a line between them that says what was left out and where to find it."""
        if self._bytes <= 2 * SHOWN_BYTES:
            return clean(bytes(self._head + self._tail).decode(errors="replace"))
        head, tail = _first_lines(bytes(self._head)), _last_lines(bytes(self._tail[-SHOWN_BYTES:]))
        lines = self._newlines - head.count(b"\n") - tail.count(b"\n")
        path = self.keep()
        if path is None:
            where = "the full output could not be stored"
        elif self._written == self._bytes:
            where = f"full output: {path}"
        else:
            where = f"the first {self._written} bytes of the output: {path}"
        left_out = f"[{lines} lines / {self._bytes - len(head) - len(tail)} bytes omitted; {where}]"
        before, after = (clean(part.decode(errors="replace")) for part in (head, tail))
        return f"{before}{'' if before.endswith(chr(10)) else chr(10)}{left_out}\n{after}"


def _first_lines(head: bytes) -> bytes:
    """Up to the end of a line where one is near, else of a character."""
    line = head.rfind(b"\n") + 1
    if line > len(head) // 2:
        return head[:line]
    for back in range(1, 4):
        lead = head[-back]
        if lead >= 0xC0:  # starts a character of 2, 3 or 4 bytes
            return head[:-back] if (4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2) > back else head
        if lead < 0x80:
            break
    return head


def _last_lines(tail: bytes) -> bytes:
    line = tail.find(b"\n") + 1
    if 0 < line < len(tail) // 2:
        return tail[line:]
    start = 0
    while start < 3 and 0x80 <= tail[start] < 0xC0:  # the rest of a character that was cut
        start += 1
    return tail[start:]


def clean(text: str) -> str:
    """Without escape sequences and control characters other than tab and newline; a return alone ends a line."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))
