"""Pictures and films inside a prompt: which token stands for which row of which picture, and the encoded rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from m3agent.errors import ConversationError
from m3agent.media.pixels import Patches


@dataclass(frozen=True, eq=False)
class MediaRun:
    """Placeholder tokens side by side in the log, and the rows of one vision grid that replace them."""

    start: int  # position in the log
    count: int
    patches: Patches
    grid: int  # which of the patches' grids
    row: int  # the grid's row at `start`

    @property
    def end(self) -> int:
        return self.start + self.count


def place(
    ids: Sequence[int],
    start: int,
    media: Sequence[tuple[int, Patches]],
    placeholders: Mapping[str, int],
    merge: int,
) -> list[MediaRun]:
    """Find the placeholder tokens of each picture or film in `ids`, which begin at position `start` of the log.

    media: (offset in ids where its tokens begin, patches), by ascending offset; text may stand between the tokens of
    a film. placeholders: the token id per kind of patches. merge: patches per token and side.
    Raises ConversationError when tokens and rows do not match one to one.
    """
    runs: list[MediaRun] = []
    position = 0
    marks = frozenset(placeholders.values())
    for offset, patches in media:
        position = _skip_text(ids, position, offset, marks)
        mark = placeholders[patches.kind]
        for grid, (t, h, w) in enumerate(patches.grids):
            row, rows = 0, t * h * w // merge**2
            while row < rows:
                while position < len(ids) and ids[position] not in marks:
                    position += 1
                first = position
                while position < len(ids) and ids[position] == mark and row + position - first < rows:
                    position += 1
                if position == first:
                    raise ConversationError(
                        f"the {patches.kind} at token {start + offset} needs {patches.tokens} placeholder tokens "
                        "and the prompt holds fewer"
                    )
                runs.append(MediaRun(start + first, position - first, patches, grid, row))
                row += position - first
    _skip_text(ids, position, len(ids), marks)
    return runs


def _skip_text(ids: Sequence[int], begin: int, end: int, marks: frozenset[int]) -> int:
    for position in range(begin, end):
        if ids[position] in marks:
            raise ConversationError(f"prompt token {position} is a media placeholder without a picture or film")
    return max(begin, end)


class FeatureCache:
    """Encoded rows by content, the least recently used ones dropped beyond `limit` bytes. For the worker alone."""

    def __init__(self, encode: Callable[[Tensor, list[tuple[int, int, int]]], Tensor], limit: int = 256 << 20) -> None:
        self._encode = encode
        self._limit = limit
        self._size = 0
        self._rows: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def rows(self, patches: Patches, grid: int) -> Tensor:
        """The rows [tokens of the grid, hidden] of one vision grid. Grids do not see each other: each is run alone."""
        key = (patches.digest, grid)
        if key in self._rows:
            self._rows.move_to_end(key)
            return self._rows[key]
        begin = sum(t * h * w for t, h, w in patches.grids[:grid])
        t, h, w = patches.grids[grid]
        rows = self._encode(patches.pixels[begin : begin + t * h * w], [patches.grids[grid]])
        self._rows[key] = rows
        self._size += rows.nbytes
        while self._size > self._limit and len(self._rows) > 1:
            self._size -= self._rows.popitem(last=False)[1].nbytes
        return rows

    def inside(self, runs: Sequence[MediaRun], start: int, end: int) -> list[tuple[int, Tensor]]:
        """For the tokens at positions start to end: (offset from start, rows) of every run that touches them."""
        found: list[tuple[int, Tensor]] = []
        for run in runs:
            first, last = max(run.start, start), min(run.end, end)
            if first < last:
                row = run.row + first - run.start
                found.append((first - start, self.rows(run.patches, run.grid)[row : row + last - first]))
        return found
