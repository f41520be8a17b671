"""`TokenLog`: a list of tokens that only grows at its end, in full pieces that forks share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

PIECE = 256  # tokens


class TokenLog:
    """A fork copies one reference for each piece and at most one piece of tokens: microseconds for any log."""

    def __init__(self) -> None:
        self._pieces: list[array[int]] = []  # full, never changed again
        self._tail = array("i")

    def __len__(self) -> int:
        return len(self._pieces) * PIECE + len(self._tail)

    def __iter__(self) -> Iterator[int]:
        return chain(*self._pieces, self._tail)

    @property
    def last(self) -> int | None:
        if self._tail:
            return self._tail[-1]
        return self._pieces[-1][-1] if self._pieces else None

    def append(self, token: int) -> None:
        self._tail.append(token)
        if len(self._tail) == PIECE:
            self._pieces.append(self._tail)
            self._tail = array("i")

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def slice(self, start: int, end: int) -> list[int]:
        """The tokens at positions start to end - 1."""
        found: list[int] = []
        for number in range(start // PIECE, -(-end // PIECE)):
            piece = self._pieces[number] if number < len(self._pieces) else self._tail
            found += piece[max(0, start - number * PIECE) : end - number * PIECE]
        return found

    def array(self, tokens: int) -> NDArray[np.int32]:
        """The first `tokens`, copied."""
        full, rest = divmod(tokens, PIECE)
        whole = self._pieces[:full]
        last = (self._pieces[full] if full < len(self._pieces) else self._tail)[:rest]
        return np.frombuffer(b"".join([*whole, last]), np.int32).copy()

    def cut(self, tokens: int) -> None:
        """Keep the first `tokens`."""
        full = tokens // PIECE
        if full < len(self._pieces):
            self._tail = self._pieces[full][: tokens % PIECE]
            del self._pieces[full:]
        else:
            del self._tail[tokens % PIECE :]

    def fork(self) -> TokenLog:
        other = TokenLog()
        other._pieces, other._tail = list(self._pieces), self._tail[:]
        return other
