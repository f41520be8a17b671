"""Speculative decoding: what a sequence may say next, guessed from what it has said already.

Where the last tokens stood before, the ones that followed them there are the draft: code that is written again, quoted
results, repeated calls. One step of the model then checks all of them, and keeps those that it would have said itself;
so drafts change how long an answer takes and nothing else. How many tokens a draft has is weighed at every step: how
often drafts like it held, against what more rows cost in a step of this model on this machine. Where none is worth it,
there is none.

After: Saxena, prompt lookup decoding (2023); Leviathan et al., 2023, for why the tokens' distribution stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m3agent.runtime.log import TokenLog

LENGTHS = (3, 7, 15, 31)  # tokens of a draft: with the last token before them, steps of 4, 8, 16 and 32 rows
MATCH = 32  # tokens; a longer agreement is not told from one of this length
GAIN = 1.05  # how much faster a draft has to promise to be, before it is tried


class Draft:
    """The tokens of one request, and where they were said before."""

    def __init__(self, log: TokenLog, tokens: int) -> None:
        self.matched = 0  # tokens before the draft that agree, MATCH at most
        self._log, self._prompt = log, tokens
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)  # with room to grow
        self._length = 0
        self._follows: int | None = None  # where the next token stood before
        self._left = 0  # where that was before it turned out to be another one

    def propose(self, emitted: Sequence[int], most: int) -> list[int]:
        """`most` tokens that may follow the log and what was emitted after it, or none; `matched` tells of their past.

        Where the past is shorter than that, it is taken for a period.
        """
        self._grow(emitted)
        if self._follows is None:
            self._look()
        if self._follows is None:
            return []
        return np.resize(self._tokens[self._follows : self._length], most).tolist()

    def _grow(self, emitted: Sequence[int]) -> None:
        if not self._length:
            self._tokens, self._length = self._log.array(self._prompt), self._prompt
        known, length = self._length, self._prompt + len(emitted)
        if length > self._tokens.size:
            self._tokens = np.concatenate([self._tokens, np.empty(length // 2 + 256, np.int32)])
        self._tokens[known:length] = emitted[known - self._prompt :]
        self._length = length
        # A place stays good as long as the new tokens are those that stood there.
        new, place = length - known, self._follows
        if place is None or not new:
            return
        if np.array_equal(self._tokens[place : place + new], self._tokens[known:length]):
            self._follows, self.matched = place + new, min(self.matched + new, MATCH)
        else:
            self._follows, self._left = None, place

    def _look(self) -> None:
        """The longest agreement with the last tokens. Of equal ones the first behind the place that was left, where a
        text goes on after a change; else the latest.
        """
        tokens, end = self._tokens, self._length
        places = np.flatnonzero(tokens[: end - 1] == tokens[end - 1]) + 1  # what follows a token like the last one
        if not places.size:
            return
        matched = 1
        while matched < min(MATCH, end - 1):
            before = places - matched - 1
            longer = places[(before >= 0) & (tokens[before] == tokens[end - 1 - matched])]
            if not longer.size:
                break
            places, matched = longer, matched + 1
        after = np.searchsorted(places, self._left, side="right") if self._left else places.size
        self._follows, self.matched = int(places[min(after, places.size - 1)]), matched


class Trust:
    """How often a drafted token holds, by how many tokens before it agree. It begins cautious and forgets slowly."""

    EDGES = (1, 2, 3, 5, 9, 17)
    BEGIN = (0.1, 0.2, 0.35, 0.55, 0.75, 0.85)
    MEMORY = 64.0  # tokens

    def __init__(self) -> None:
        self._held = [8 * share for share in self.BEGIN]
        self._seen = [8.0] * len(self.BEGIN)

    def of(self, matched: int) -> float:
        place = self._place(matched)
        return self._held[place] / self._seen[place]

    def learn(self, matched: int, held: bool) -> None:
        place = self._place(matched)
        if self._seen[place] >= self.MEMORY:
            self._held[place] *= 1 - 1 / self.MEMORY
            self._seen[place] -= 1
        self._held[place] += held
        self._seen[place] += 1

    def tokens(self, matched: int, length: int) -> float:
        """How many tokens of a draft will hold, on average."""
        chain, expected = 1.0, 0.0
        for ahead in range(length):
            chain *= self.of(matched + ahead)
            expected += chain
        return expected

    def _place(self, matched: int) -> int:
        return max(place for place, edge in enumerate(self.EDGES) if edge <= max(matched, 1))


class StepCosts:
    """What a decode step of so many sequences costs with more rows than these, as a multiple of one without drafts."""

    WEIGHT = 0.2
    GUESS = 0.1  # of a plain step, for each row that is added: what was never tried has to be tried to be known

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # by sequences: seconds
        self._times: dict[tuple[int, int], float] = {}  # by sequences and rows, in steps of powers of two

    def learn(self, sequences: int, rows: int, seconds: float) -> None:
        if rows == sequences:
            self._plain[sequences] = _blend(self._plain.get(sequences), seconds, self.WEIGHT)
        elif (plain := self._plain.get(sequences)) is not None:
            key = sequences, _ceiling(rows)
            self._times[key] = _blend(self._times.get(key), seconds / plain, self.WEIGHT)

    def plain(self, sequences: int) -> float | None:
        """Seconds of a step without drafts; None where there was none of so many sequences."""
        return self._plain.get(sequences)

    def of(self, sequences: int, rows: int) -> float:
        if rows == sequences:
            return 1.0
        size = _ceiling(rows)
        found = self._times.get((sequences, size))
        if found is not None:
            return found
        smaller = [(other, times) for (count, other), times in self._times.items() if count == sequences]
        below = max(((other, times) for other, times in smaller if other < size), default=(sequences, 1.0))
        return below[1] + self.GUESS * (size - below[0])


class Speculation:
    """Chooses the drafts of a step. One for all requests of a runtime, since what it learns holds for the next one."""

    def __init__(self) -> None:
        self.trust = Trust()
        self.costs = StepCosts()

    def lengths(self, drafts: Sequence[tuple[int, int]]) -> list[int]:
        """How many tokens to check for each sequence of a step. drafts: of each, tokens that agree before its draft,
        and how many it has, 0 for none.
        """
        count = len(drafts)
        chosen = [0] * count
        if self.costs.plain(count) is None or not any(length for _, length in drafts):
            return chosen
        said, rows = float(count), count
        speed = said
        # The likeliest drafts first; each as long as makes the step as a whole fastest.
        for place in sorted(range(count), key=lambda place: -drafts[place][0]):
            matched, length = drafts[place]
            best, best_said = 0, said
            for size in LENGTHS:
                if not length:
                    break
                taken = min(size, length)
                more = said + self.trust.tokens(matched, taken)
                faster = more / self.costs.of(count, rows + taken)
                if faster > speed * (1.0 if best else GAIN):
                    best, best_said, speed = taken, more, faster
                if taken == length:
                    break
            chosen[place], said, rows = best, best_said, rows + best
        return chosen


def _blend(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)


def _ceiling(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
