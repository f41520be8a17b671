"""The tools themselves: what each does with a path and what it answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from m3agent.errors import MediaError, ToolError
from m3agent.media import Image
from m3agent.media.image import DECODERS
from m3agent.media.sniff import sniff
from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool
from m3agent.tools.workspace.beneath import Place, Root, explained
from m3agent.tools.workspace.encoding import Text, decode
from m3agent.tools.workspace.globs import path_filter
from m3agent.tools.workspace.history import History, unified_diff
from m3agent.tools.workspace.lines import insert, matches, plain, replace, split_lines
from m3agent.tools.workspace.save import Content, current, read_content, remove, save
from m3agent.tools.workspace.search import Query, search
from m3agent.tools.workspace.shown import MAX_ROWS, clipped, listed, numbered, printable
from m3agent.tools.workspace.walk import Entry, entries, files


def workspace(root: str | os.PathLike[str], *, write: bool = True) -> list[Tool[..., Any]]:
    """Tools to read, search and change the files beneath the folder `root`, and none outside it.

    read, list, glob and grep; with `write` also write, edit, multi_edit, insert, diff and undo. `root` is opened now
    and may be a link itself; paths are relative to it. Files keep encoding, byte order mark, line endings, final
    newline and mode. Of a file with several hard links, only the name that was edited gets the new bytes.

    Raises ToolDefinitionError when `root` is no folder that can be opened, or the system cannot open files relative
    to a directory (Windows).
    """
    place = Root(root)
    reader = Reader(place)
    tools = [
        tool(reader.read),
        tool(reader.list_directory, name="list"),
        tool(reader.glob),
        tool(reader.grep),
    ]
    if write:
        writer = Writer(place)
        tools += [
            tool(writer.write),
            tool(writer.edit),
            tool(writer.multi_edit),
            tool(writer.insert),
            tool(writer.diff),
            tool(writer.undo),
        ]
    return tools


class Reader:
    """The tools that change nothing."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def read(self, path: str, start: int = 1, end: int | None = None) -> str | Image:
        """Read a text file with line numbers, or look at a picture.

        Args:
            start: first line, from 1
            end: last line
        """
        with explained(path), _opened(self._root, path, os.O_RDONLY) as descriptor:
            data = read_content(descriptor, path).data
        if sniff(data) in DECODERS:
            try:
                picture = Image(data)
                picture.load()
                return picture
            except MediaError as error:
                if decode(data) is None:
                    raise ToolError(f"{path!r}: {error}") from None
        text = _text(path, data)
        lines = split_lines(text.shown(text.text))
        if not lines:
            return "(the file is empty)"
        if not 1 <= start <= len(lines) or (end is not None and end < start):
            raise ToolError(f"{path!r} has lines 1 to {len(lines)}; there are no lines {start} to {end or 'the end'}.")
        note = "" if text.encoding == "UTF-8" else f"\n(the file's encoding: {text.encoding})"
        return numbered(lines, start, end) + note

    def list_directory(self, path: str = ".") -> str:
        """List a directory: directories end in '/', files have their size in bytes."""
        with explained(path), _opened(self._root, path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            rows = [_row(entry) for entry in entries(descriptor)]
        return listed(rows, "use glob") or "(the directory is empty)"

    def glob(self, pattern: str, context: Context, path: str = ".") -> str:
        """Find files by name, such as '*.py' (in any directory) or 'src/**/test_*.py'.

        Args:
            pattern: '*', '?', '[ab]', '**' and '{a,b}' are understood
            path: directory to start from; .git, .venv, node_modules and __pycache__ beneath it are left out
        """
        fits = path_filter(pattern)
        with explained(path):
            rows = [printable(place.path) for place, inner in _files(self._root, path, context) if fits(inner)]
        return listed(rows, "narrow the pattern or the path") or "No file matches."

    def grep(self, pattern: str, context: Context, path: str = ".", glob: str = "**", ignore_case: bool = False) -> str:
        """Search the text of files with a regular expression. Gives path, line number and line.

        Args:
            pattern: regular expression, matched within a line
            path: file or directory to search; .git, .venv, node_modules and __pycache__ beneath it are left out
            glob: search only files that match, such as '*.py'
        """
        fits = path_filter(glob)
        with explained(path):
            chosen = (place for place, inner in _files(self._root, path, context) if fits(inner))
            found = search(chosen, Query(pattern, ignore_case, MAX_ROWS, lambda: context.cancelled))
        rows = found.rows or [f"No match in {found.files} files."]
        if found.stopped:
            rows.append(f"… stopped after {MAX_ROWS} matches; narrow the pattern, path or glob")
        if found.too_large:
            rows.append(f"({found.too_large} files are too large and were not searched)")
        return clipped("\n".join(rows), "narrow the pattern, path or glob")


@dataclass(frozen=True)
class Edit:
    """One replacement: `old` has to occur exactly once."""

    old: str
    new: str


class Writer:
    """The tools that change files. Calls of one turn run side by side; here one waits for the other."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._history = History()
        self._lock = threading.Lock()

    def write(self, path: str, content: str) -> str:
        """Write a whole file: a new one, or new content for an old one. Use edit for a part."""
        with self._change(path, make=True) as (place, before):
            old = decode(before.data) if before else None
            if old is None:
                data = _encoded(path, Text(""), content)
            else:
                text = replace(old.text, 0, len(old.text), content) if old.text else content
                data = _encoded(path, old, text)
            self._save(place, before, data)
            verb = "Wrote" if before else "Created"
            return f"{verb} {printable(place.path)}: {len(split_lines(content))} lines.{_links(before)}"

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace one piece of text in a file.

        Args:
            old: the text to replace, exactly as in the file without line numbers; it has to occur exactly once
            new: the text to put there
        """
        return self.multi_edit(path, [Edit(old, new)])

    def multi_edit(self, path: str, edits: list[Edit]) -> str:
        """Replace several pieces of text in one file, one after the other: all of them or, if one fails, none."""
        if not edits:
            raise ToolError("There are no edits.")
        with self._change(path) as (place, before):
            text = self._text(path, before)
            changed, at = text.text, list[int]()
            for number, edit in enumerate(edits, 1):
                label = f"edit {number} of {len(edits)}: " if len(edits) > 1 else ""
                start, end = _only_match(path, changed, edit, label)
                at.append(plain(changed[:start], changed).count("\n") + 1)
                changed = replace(changed, start, end, edit.new)
            self._save(place, before, _encoded(path, text, changed))
            return f"Edited {printable(place.path)} at line {', '.join(map(str, at))}.{_links(before)}"

    def insert(self, path: str, after: int, text: str) -> str:
        """Insert lines into a file.

        Args:
            after: the line after which they go; 0 is the start of the file, -1 its end
            text: the lines
        """
        with self._change(path) as (place, before):
            old = self._text(path, before)
            count = len(split_lines(old.text))
            if not -1 <= after <= count:
                raise ToolError(f"{path!r} has {count} lines; after={after} is none of -1 to {count}.")
            after = count if after == -1 else after
            self._save(place, before, _encoded(path, old, insert(old.text, after, text)))
            name, number = printable(place.path), len(split_lines(text))
            return f"Inserted {number} lines into {name} after line {after}.{_links(before)}"

    def diff(self, path: str = ".") -> str:
        """Show what these tools changed so far, in one file or in all files of a directory."""
        with self._lock:
            with explained(path), self._root.place(path) as place:
                beneath = "" if place.path == "." else f"{place.path}/"
                paths = [name for name in self._history.paths if name == place.path or name.startswith(beneath)]
            text = "".join(self._difference(changed) for changed in paths)
        return clipped(text.removesuffix("\n"), "ask for the diff of one path") or "Nothing is changed."

    def undo(self, path: str) -> str:
        """Take back the last change of a file. Can be repeated."""
        with self._change(path) as (place, before):
            data = self._history.previous(place.path, before.data if before else None)
            if data is None and before is not None:
                remove(place, before)
                answer = f"Undone: {printable(place.path)} did not exist before and is gone again."
            else:
                save(place, data or b"", before)
                answer = f"Undone: {printable(place.path)} is as it was before the last change."
            self._history.undone(place.path)
            return answer

    @contextmanager
    def _change(self, path: str, *, make: bool = False) -> Generator[tuple[Place, Content | None]]:
        with self._lock, explained(path, changing=True), self._root.place(path, make=make) as place:
            yield place, current(place)

    def _save(self, place: Place, before: Content | None, data: bytes) -> None:
        save(place, data, before)
        self._history.record(place.path, before.data if before else None, data)

    def _text(self, path: str, before: Content | None) -> Text:
        if before is None:
            raise ToolError(f"{path!r}: no such file. Use write to make a new one.")
        return _text(path, before.data)

    def _difference(self, path: str) -> str:
        try:
            with _opened(self._root, path, os.O_RDONLY) as descriptor:
                now = read_content(descriptor, path).data
        except FileNotFoundError:
            now = None
        except (OSError, ToolError):
            return f"--- {printable(path)}\n+++ {printable(path)}\n(cannot be read now)\n"
        return unified_diff(path, self._history.original(path), now)


@contextmanager
def _opened(root: Root, path: str, flags: int) -> Generator[int]:
    descriptor = root.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _files(root: Root, path: str, context: Context) -> Iterator[tuple[Place, str]]:
    """(place, its path from the directory `path`) of every file beneath `path`, or of the file `path` itself."""
    with root.place(path) as place:
        try:
            directory = place.open(os.O_RDONLY | os.O_DIRECTORY)
        except NotADirectoryError:
            yield place, place.name
            return
        prefix = "" if place.path == "." else place.path
    try:
        for inner in files(directory, prefix, lambda: context.cancelled):
            yield inner, inner.path.removeprefix(prefix).removeprefix("/")
    finally:
        os.close(directory)


def _text(path: str, data: bytes) -> Text:
    text = decode(data)
    if text is None:
        raise ToolError(f"{path!r} is not text ({sniff(data)}, {len(data)} bytes).")
    return text


def _encoded(path: str, text: Text, content: str) -> bytes:
    try:
        return text.encode(content)
    except UnicodeEncodeError as error:
        character = content[error.start]
        raise ToolError(
            f"{path!r} is {text.encoding}, which has no character {character!a}. Nothing was changed."
        ) from None


def _only_match(path: str, text: str, edit: Edit, label: str) -> tuple[int, int]:
    if not edit.old:
        raise ToolError(f"{label}'old' is empty. Give the text to replace, or use insert. Nothing was changed.")
    found = matches(text, edit.old)
    if not found:
        raise ToolError(
            f"{label}'old' does not occur in {path!r} (0 matches). Read the file and copy the text exactly, without "
            "line numbers. Nothing was changed."
        )
    if len(found) > 1:
        count = max(len(found), plain(text, text).count(plain(edit.old, text)))
        lines = ", ".join(str(plain(text[:start], text).count("\n") + 1) for start, _ in found)
        raise ToolError(
            f"{label}'old' occurs {count} times in {path!r} (lines {lines}{', …' if count > len(found) else ''}); it "
            "has to occur once. Give more of the text around it. Nothing was changed."
        )
    return found[0]


def _links(before: Content | None) -> str:
    if before is None or before.status.st_nlink < 2:
        return ""
    return f" The file had {before.status.st_nlink} hard links; the other names keep the old content."


def _row(entry: Entry) -> str:
    name = printable(entry.name)
    match entry.kind:
        case "directory":
            return f"{name}/"
        case "file":
            return f"{name}  {entry.size}"
        case _:
            return f"{name}  ({entry.kind})"
