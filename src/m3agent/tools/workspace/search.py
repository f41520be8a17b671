"""A regular expression in many files. The search runs in a child process that is given open files and no paths.

The child is ripgrep where it is installed, else Python. It cannot be led outside, since it opens nothing, and a pattern
that runs for ever is ended with it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from m3agent.errors import ToolError
from m3agent.tools.workspace.beneath import Place
from m3agent.tools.workspace.save import MAX_BYTES
from m3agent.tools.workspace.shown import printable

SECONDS = 20.0
COLUMNS = 300  # characters of a line that are given
_FILES_AT_ONCE = 128  # descriptors are few
_HEAD = 8192  # bytes in which a NUL makes a file binary
_ROW = re.compile(rb"^/dev/fd/(\d+)\x00(\d+):(.*)$", re.MULTILINE)
_BAD_PATTERN = 3


@dataclass
class Found:
    """`rows` are "path:line: text". `stopped` is True when there were more rows than the limit."""

    rows: list[str] = field(default_factory=list[str])
    files: int = 0
    too_large: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class Query:
    """What is looked for, at most `limit` rows of it; `cancelled` is asked while the search runs."""

    pattern: str
    ignore_case: bool
    limit: int
    cancelled: Callable[[], bool]
    deadline: float = field(default_factory=lambda: time.monotonic() + SECONDS)


def search(places: Iterable[Place], query: Query) -> Found:
    """Search text files; links, binary files and files over the size limit are left out.

    Raises ToolError for a pattern that is no regular expression and for a search that takes too long.
    """
    found = Found()
    ripgrep = shutil.which("rg")
    with closing(_batches(places, found)) as batches:
        for batch in batches:
            output = _ripgrep(ripgrep, query, list(batch)) if ripgrep else None
            if output is None:
                output = _python(query, list(batch))
            found.rows += _rows(output, batch)
            if len(found.rows) > query.limit:
                del found.rows[query.limit :]
                found.stopped = True
                break
    return found


def _rows(output: bytes, batch: Mapping[int, str]) -> list[str]:
    """In the order of the files: ripgrep's threads end in any."""
    rows: dict[int, list[str]] = {descriptor: [] for descriptor in batch}
    for descriptor, number, line in _ROW.findall(output):
        text = line.decode("utf-8", "replace").removesuffix("\r")
        rows[int(descriptor)].append(f"{printable(batch[int(descriptor)])}:{int(number)}: {text}")
    return [row for rows_of_file in rows.values() for row in rows_of_file]


def _batches(places: Iterable[Place], found: Found) -> Generator[dict[int, str]]:
    """Open text files, descriptor → path, some at a time; closed when the next are asked for."""
    batch: dict[int, str] = {}
    try:
        for place in places:
            try:
                descriptor = place.open(os.O_RDONLY)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                continue  # a link, gone meanwhile, or not ours to read
            if not _is_searched(descriptor, found):
                os.close(descriptor)
                continue
            batch[descriptor] = place.path
            found.files += 1
            if len(batch) == _FILES_AT_ONCE:
                yield batch
                _close(batch)
        if batch:
            yield batch
    finally:
        _close(batch)


def _close(batch: dict[int, str]) -> None:
    for descriptor in batch:
        os.close(descriptor)
    batch.clear()


def _is_searched(descriptor: int, found: Found) -> bool:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return False
    if status.st_size > MAX_BYTES:
        found.too_large += 1
        return False
    head = os.pread(descriptor, _HEAD, 0)
    return b"\x00" not in head or head.startswith((b"\xff\xfe", b"\xfe\xff"))


def _ripgrep(program: str, query: Query, descriptors: Sequence[int]) -> bytes | None:
    """None for a pattern that only Python can search for (or none can)."""
    case = "--ignore-case" if query.ignore_case else "--case-sensitive"
    command = [program, "--no-config", "--no-ignore", "--no-messages", "--color=never", "--no-heading", "--null"]
    command += [
        "--with-filename",
        "--line-number",
        "--crlf",
        f"--max-count={query.limit + 1}",
        f"--max-columns={COLUMNS}",
    ]
    command += ["--max-columns-preview", case, f"--regexp={query.pattern}", "--"]
    command += [f"/dev/fd/{descriptor}" for descriptor in descriptors]
    done = _run(command, descriptors, query)
    return None if done.returncode not in (0, 1) and not done.stdout else done.stdout


def _python(query: Query, descriptors: Sequence[int]) -> bytes:
    child = str(Path(__file__).with_name("search_child.py"))
    command = [sys.executable, "-I", "-S", child, str(int(SECONDS)), "ignore" if query.ignore_case else "match"]
    command += [str(query.limit + 1), str(COLUMNS), query.pattern, *map(str, descriptors)]
    done = _run(command, descriptors, query)
    if done.returncode == _BAD_PATTERN:
        raise ToolError(f"The pattern is not a regular expression: {done.stderr.decode(errors='replace')[:200]}.")
    if done.returncode != 0:
        raise ToolError("The search took too much time or memory. Use a simpler pattern, or fewer files.")
    return done.stdout


def _run(command: list[str], descriptors: Sequence[int], query: Query) -> subprocess.CompletedProcess[bytes]:
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, pass_fds=descriptors)
    except ValueError:  # a NUL or a lone surrogate
        raise ToolError("The pattern has characters that are not text.") from None
    with child:
        try:
            while True:
                try:
                    output, errors = child.communicate(timeout=0.1)
                    return subprocess.CompletedProcess(command, child.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    if query.cancelled():
                        raise ToolError("The search was cancelled.") from None
                    if time.monotonic() > query.deadline:
                        raise ToolError(
                            f"The search took more than {SECONDS:g} seconds. Use a simpler pattern, or fewer files."
                        ) from None
        finally:
            child.kill()  # does nothing to one that has ended
