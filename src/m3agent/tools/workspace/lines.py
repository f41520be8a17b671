"""Changing a part of a text whose line endings are anything, for a model that writes "\\n".

An ending is "\\r\\n" or "\\n"; a lone "\\r" is one only in a text that has no "\\n" at all.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from difflib import SequenceMatcher

_COMPARED = 250_000  # pairs of lines that are compared to keep endings; beyond, lines are paired by position


def split_lines(text: str) -> list[str]:
    """The lines without their endings. A final ending begins no further line."""
    lines = plain(text, text).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def plain(part: str, text: str) -> str:
    """`part` with "\\n" for every ending that counts as one in `text`."""
    return part.replace("\r\n", "\n") if "\n" in text else re.sub("\r\n?", "\n", part)


def matches(text: str, old: str, most: int = 10) -> list[tuple[int, int]]:
    """The first (start, end) in `text` where `old` stands, overlapping ones too, endings taken as equal."""
    wanted, within = plain(old, text), plain(text, text)
    shortened: list[int] = []  # places in `within` of the endings that are two characters in `text`
    if len(within) != len(text):
        shortened = [match.start() - index for index, match in enumerate(re.finditer("\r\n", text))]
    found: list[tuple[int, int]] = []
    start = within.find(wanted)
    while start >= 0 and wanted and len(found) < most:
        end = start + len(wanted)
        found.append((start + bisect_left(shortened, start), end + bisect_left(shortened, end)))
        start = within.find(wanted, start + 1)
    return found


def replace(text: str, start: int, end: int, new: str) -> str:
    """`new` in the place of text[start:end]: kept lines keep their endings, new ones get those of what they replace."""
    pieces, endings = _split(text[start:end], text)
    endings.append(_ending_at(text, end))  # of the line in which the replaced part ends
    lines = plain(new, text).split("\n")
    taken = _paired_endings(pieces, endings, lines)
    middle = "".join(line + ending for line, ending in zip(lines, [*taken[:-1], ""], strict=True))
    return text[:start] + middle + text[end:]


def insert(text: str, after: int, new: str) -> str:
    """`new` as lines of their own after line `after` (0: before the first). A missing final ending stays missing."""
    if not text:
        return new
    ends = [match.end() for match in re.finditer("\r\n|\n" if "\n" in text else "\r", text)]
    body = plain(new, text).removesuffix("\n")
    if after > len(ends):  # after a last line without an ending
        ending = _ending_at(text, len(text))
        return text + (ending + body.replace("\n", ending))
    offset = ends[after - 1] if after else 0
    ending = _ending_at(text, max(offset - 1, 0))
    return text[:offset] + body.replace("\n", ending) + ending + text[offset:]


def _split(part: str, text: str) -> tuple[list[str], list[str]]:
    """(lines, the endings between them) of a part of `text`."""
    pieces = re.split("(\r\n|\n)" if "\n" in text else "(\r)", part)
    return pieces[::2], pieces[1::2]


def _ending_at(text: str, position: int) -> str:
    """The ending of the line at `position`; of the line before on an unterminated last line; "\\n" with none at all."""
    if "\n" not in text:
        return "\r" if "\r" in text else "\n"
    at = text.find("\n", position)
    if at < 0:
        at = text.rfind("\n", 0, position)
    return "\r\n" if text[max(at - 1, 0) : at] == "\r" else "\n"


def _paired_endings(old: list[str], endings: list[str], new: list[str]) -> list[str]:
    """One ending for each new line, given the old lines and theirs."""
    if len(set(endings)) == 1:
        return endings[:1] * len(new)
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    middle_old, middle_new = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(middle_old) * len(middle_new) > _COMPARED:
        blocks = [("replace", 0, len(middle_old), 0, len(middle_new))]
    else:
        blocks = SequenceMatcher(None, middle_old, middle_new, autojunk=False).get_opcodes()
    taken = endings[:head]
    for _, start, end, new_start, new_end in blocks:
        first, last = head + start, head + max(end - 1, start - 1)
        last = max(last, 0)  # lines put before the first take its ending
        taken += [endings[min(first + index, last)] for index in range(new_end - new_start)]
    return taken + endings[len(endings) - tail :]


def _common(one: list[str], other: list[str]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
