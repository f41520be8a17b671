"""One call of generate, as the worker sees it: what is to be computed, what came of it, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from m3agent.mailbox import Mailbox
from m3agent.runtime.features import MediaRun
from m3agent.runtime.guide import Guide
from m3agent.runtime.kv.keys import Identity, identify, token_ids
from m3agent.runtime.kv.table import BlockTable
from m3agent.runtime.log import TokenLog
from m3agent.runtime.sampling import Sampling, generator
from m3agent.runtime.speculate import Draft
from m3agent.runtime.usage import Usage


class Token(NamedTuple):
    """A generated token. logprob: its natural log-probability under the model itself (temperature 1, no cut)."""

    id: int
    logprob: float


@dataclass(frozen=True)
class Ended:
    """The last thing a request's mailbox receives; from then on the worker does not touch the sequence.

    finish: "stop" (a stop token), "length" (max_tokens), "cancelled" or "error". logits: those behind the prompt,
    float32 [vocab], when no token was asked for.
    """

    finish: str
    error: BaseException | None = None
    logits: Tensor | None = None


@dataclass(eq=False)
class Request:
    """The worker alone changes it, but for `cancelled`, which anyone may set, and `taken`, which the reader counts."""

    table: BlockTable
    log: TokenLog  # of the sequence; its first `prompt` tokens do not change while this runs
    media: list[MediaRun]  # the pictures and films in the log
    sampling: Sampling
    stop: frozenset[int]
    guide: Guide | None = None
    priority: int = 0  # a higher one comes first
    logits: Tensor | None = None  # behind the last token, [vocab], where they are known
    mailbox: Mailbox[Token | Ended] = field(default_factory=Mailbox)
    cancelled: bool = False
    ended: bool = False  # the worker has let go of the table
    taken: int = 0  # tokens that the reader took out of the mailbox

    def __post_init__(self) -> None:
        self.random = generator(self.sampling.seed)
        self.prompt = len(self.log)
        self.emitted: list[int] = []
        self.draft = Draft(self.log, self.prompt)
        self.drafted = self.accepted = 0  # tokens
        self.pending: list[int] = []  # the ids at positions table.cached and on
        self.runs: list[MediaRun] = []  # those pictures that pending tokens may touch
        self.reused = self.computed = self.recomputed = self.media_tokens = self.made = 0
        self.began = time.perf_counter()
        self.first_at = self.last_at = self.ended_at = 0.0

    def begin(self) -> None:
        """The table is this request's from now on: see what of the log it holds."""
        table = self.table
        if table.cached == self.prompt and self.logits is None:
            table.rewind(self.prompt - 1)  # a stream was left right after a computed token: nobody kept what follows it
        self.pending = self.log.slice(table.cached, self.prompt)
        self.look_ahead()
        self.reused = table.cached

    def look_ahead(self) -> None:
        """After the table has changed by other means than `advance`."""
        self.runs = [run for run in self.media if run.end > self.table.cached]

    @property
    def ahead(self) -> list[Identity]:
        """What the pending tokens are."""
        return identify(self.pending, self.table.cached, self.runs)

    def adopted(self, tokens: int) -> None:
        """The first `tokens` pending ones were found in the cache."""
        del self.pending[:tokens]
        self.look_ahead()
        if not self.made:
            self.reused += tokens

    def relax(self) -> None:
        """Give the table's pages back in the middle of the work; what is not found again is computed again."""
        self.pending[:0] = token_ids(self.table.identities)
        self.table.release()
        self.look_ahead()

    def cancel(self) -> None:
        """Ask the worker to stop; it does within one step. May be called from anywhere, a finalizer too."""
        self.cancelled = True

    def advance(self, count: int, advance: Callable[[BlockTable, list[Identity]], int]) -> int:
        """The first `count` pending tokens are in the pages now; returns how many of them had been there before."""
        start, end = self.table.cached, self.table.cached + count
        again = advance(self.table, identify(self.pending[:count], start, self.runs))
        if not self.made:
            self.computed += count
            self.recomputed += again
            self.media_tokens += sum(max(0, min(r.end, end) - max(r.start, start)) for r in self.runs)
        del self.pending[:count]
        if self.runs and not self.pending:
            self.runs = []
        return again

    def emit(self, token: Token) -> None:
        self.last_at = time.perf_counter()
        if not self.made:
            self.first_at = self.last_at
        self.made += 1
        self.pending = [token.id]
        self.emitted.append(token.id)
        self.mailbox.put(token)

    def end(self) -> None:
        self.ended_at = time.perf_counter()
        self.ended = True

    def usage(self) -> Usage:
        """What was used so far; output tokens are those that were taken, since only they are in the log."""
        return Usage(
            prompt_tokens=self.prompt,
            reused_tokens=self.reused,
            computed_tokens=self.computed,
            recomputed_tokens=self.recomputed,
            output_tokens=self.taken,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            media_tokens=self.media_tokens,
            prefill_seconds=(self.first_at or self.ended_at or time.perf_counter()) - self.began,
            decode_seconds=self.last_at - self.first_at,
            first_tokens=min(self.taken, 1),
        )
