"""What a model gets to read: numbered lines and lists, cut where they are too long, and saying so."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LINES = 500
MAX_CHARACTERS = 30_000
MAX_WIDTH = 2_000  # characters of one line
MAX_ROWS = 200


def numbered(lines: Sequence[str], start: int, end: int | None) -> str:
    """Lines start..end (from 1, both included) as "number, tab, line", within the limits."""
    last = len(lines) if end is None else min(end, len(lines))
    rows: list[str] = []
    length = 0
    for number in range(start, last + 1):
        row = f"{number}\t{_narrow(lines[number - 1])}"
        if len(rows) == MAX_LINES or (rows and length + len(row) > MAX_CHARACTERS):
            break
        rows.append(row)
        length += len(row) + 1
    following = start + len(rows)
    if len(lines) >= following:
        rows.append(f"… {len(lines) - following + 1} more lines; read with start={following}")
    return "\n".join(rows)


def listed(rows: Sequence[str], hint: str) -> str:
    """One row a line, at most MAX_ROWS; `hint` says what to do about the rest."""
    if len(rows) <= MAX_ROWS:
        return "\n".join(rows)
    return "\n".join([*rows[:MAX_ROWS], f"… {len(rows) - MAX_ROWS} more; {hint}"])


def clipped(text: str, hint: str) -> str:
    """At most MAX_CHARACTERS, cut between lines."""
    if len(text) <= MAX_CHARACTERS:
        return text
    kept = text[:MAX_CHARACTERS].rpartition("\n")[0] or text[:MAX_CHARACTERS]
    rest = text[len(kept) :].count("\n")
    return f"{kept}\n… {rest} more lines; {hint}"


def printable(name: str) -> str:
    """A file's name on one line: control characters and bytes that are no text are shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in name)


def _narrow(line: str) -> str:
    return line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]} … {len(line) - MAX_WIDTH} more characters"
