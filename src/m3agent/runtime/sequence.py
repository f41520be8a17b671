"""A token log with its pages: append to it, generate from it, fork it, close it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
from torch import Tensor

from m3agent.errors import RuntimeClosed, SessionBusy
from m3agent.mailbox import outcome_of
from m3agent.media.pixels import Patches
from m3agent.runtime.features import MediaRun, place
from m3agent.runtime.guide import Guide
from m3agent.runtime.kv import BlockTable
from m3agent.runtime.kv.keys import Identity, identify, page_key
from m3agent.runtime.kv.layout import Payload, export_page
from m3agent.runtime.log import TokenLog
from m3agent.runtime.request import Ended, Request, Token
from m3agent.runtime.sampling import Sampling
from m3agent.runtime.usage import Usage

if TYPE_CHECKING:
    from m3agent.runtime.runtime import Runtime


class Sequence:
    """Made by `Runtime.sequence()`. The log only grows; what was computed for it is never computed again.

    For one task at a time; other sequences of the runtime generate at the same time. A sequence that is forgotten
    gives its pages back, `close` does so at once.
    """

    def __init__(self, runtime: Runtime, table: BlockTable | None = None) -> None:
        self._runtime = runtime
        self._engine = runtime.engine
        self._table = table or self._engine.new_table()
        self.priority = 0
        """Of its calls: those with a higher one get their prompts computed, and keep their pages, before others."""
        self._tokens = TokenLog()
        self._runs: list[MediaRun] = []
        self._logits: Tensor | None = None  # behind the last token, where they are known
        self._request: Request | None = None  # the last call, until its end was seen
        self._finalizer = weakref.finalize(self, self._engine.drop, self._table)
        self._finalizer.atexit = False

    @property
    def name(self) -> str:
        """What `runtime.sequences()` calls it; forks have the same one until they are given another."""
        return self._table.name

    @name.setter
    def name(self, value: str) -> None:
        self._table.name = value

    @property
    def tokens(self) -> list[int]:
        """A copy of the log: what was appended, and the generated tokens that were taken from the streams."""
        return list(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def last(self) -> int | None:
        """The last token of the log, None for an empty one."""
        return self._tokens.last

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the log have their keys and values in the pages."""
        return min(self._table.cached, len(self._tokens))

    @property
    def closed(self) -> bool:
        return self._table.closed

    def append(self, ids: Iterable[int], media: Items[tuple[int, Patches]] = ()) -> None:
        """Add a prompt; it is computed by the next `generate`.

        media: for each picture or film, in order, the offset in `ids` where its tokens begin.
        Raises ConversationError when placeholder tokens and pictures do not match, ValueError for an id outside the
        vocabulary, SessionBusy while a stream is open, RuntimeClosed.
        """
        self._check_idle()
        added = [int(token) for token in ids]
        vocabulary = self._runtime.vocabulary
        for token in added:
            if not 0 <= token < vocabulary:
                raise ValueError(f"token id {token} is outside the vocabulary of {vocabulary}")
        runs = place(added, len(self._tokens), media, self._runtime.placeholders, self._runtime.merge)
        self._settle()
        self._tokens.extend(added)
        self._runs += runs
        if added:
            self._logits = None

    def generate(self, sampling: Sampling | None = None, guide: Guide | None = None) -> TokenStream:
        """Compute what was appended, then generate: `async with s.generate() as stream: async for token in stream: …`.

        sampling: None takes the checkpoint's own defaults. guide: says before each token which ones may come; it serves
        one call (see `Runtime.guides`). The work begins on entering. Leaving early, or being
        cancelled, ends it within one step; the log then holds the tokens that were taken from the stream.
        Going on after leaving early, with nothing appended, computes the last token again.
        Raises ValueError for a stop token outside the vocabulary.
        Entering raises ValueError for an empty log, SessionBusy, RuntimeClosed, Overloaded; iterating raises
        ContextOverflow when the model's context or the KV cache is full, NumericalError for logits that are not finite,
        GuideError for a grammar that cannot go on, and whatever else went wrong inside the model.
        """
        sampling = sampling or self._runtime.defaults.sampling()
        sampling.check_stop(self._runtime.vocabulary)
        return TokenStream(self, sampling, guide)

    async def logits(self) -> Tensor:
        """What the model expects after the last token, float32 [vocab]; computes what was appended first."""
        if self._logits is None:
            async with self.generate(Sampling(max_tokens=0)) as stream:
                async for _ in stream:
                    raise AssertionError("no token was asked for")
        assert self._logits is not None
        return self._logits.clone()

    def fork(self, tokens: int | None = None) -> Sequence:
        """A second sequence with the same log, or with its first `tokens`. It shares every page so far; only a partly
        filled one is copied later.

        Raises SessionBusy while a stream is open, or while the last step of a stream that was dropped still runs;
        RuntimeClosed; ValueError for a cut inside a picture or behind the end.
        """
        if tokens is not None and not 0 <= tokens <= len(self._tokens):
            raise ValueError(f"the log has {len(self._tokens)} tokens; there is no first {tokens}")
        self._check_idle()
        self._settle()
        if self._request is not None:  # should it end right now, the table would hold more than the log
            raise SessionBusy("the last step of a dropped stream still runs; use its `async with` block, or fork later")
        other = Sequence(self._runtime, self._engine.fork(self._table))
        other._tokens, other._runs, other._logits = self._tokens.fork(), list(self._runs), self._logits
        other.priority = self.priority
        if tokens is not None and tokens < len(self._tokens):
            other._cut(tokens)
        return other

    def _cut(self, tokens: int) -> None:
        if any(run.start < tokens < run.end for run in self._runs):
            self.close()
            raise ValueError(f"token {tokens} lies inside a picture or film")
        self._tokens.cut(tokens)
        self._runs = [run for run in self._runs if run.end <= tokens]
        self._logits = None
        self._engine.cut(self._table, tokens)

    async def page(self, number: int) -> tuple[bytes, Payload] | None:
        """Key and content (see `kv.layout`) of a full page, None for one that is not on the device. Raises
        RuntimeClosed, SessionBusy.
        """
        self._check_idle()
        cache, table = self._engine.cache, self._table

        def export() -> tuple[bytes, Payload] | None:
            if number >= len(table.keys):
                return None
            return table.keys[number], export_page(cache.pages, table.pages[number])

        return await outcome_of(self._engine.between_steps(table, export))

    async def adopt(self, read: Callable[[bytes], Payload | None]) -> int:
        """Take over pages of tokens that were appended and not computed yet: those on the device, then those that
        `read` has (called in a thread with the key of a page). Returns how many tokens are cached now. Raises
        RuntimeClosed, SessionBusy, and what `read` raises.
        """
        self._check_idle()
        cache, table, size = self._engine.cache, self._table, self._engine.cache.page_tokens

        def ahead(end: int) -> list[Identity]:
            return identify(self._tokens.slice(table.cached, end), table.cached, self._runs)

        def find() -> bytes | None:
            """The key of the first page that is missing, of those before the last token."""
            cache.find(table, ahead(len(self._tokens)))
            end = table.cached + size
            if end >= len(self._tokens) or table.cached != len(table.pages) * size:
                return None
            return page_key(table.last_key, ahead(end))

        while (key := await outcome_of(self._engine.between_steps(table, find))) is not None:
            payload = await anyio.to_thread.run_sync(read, key)

            def promote(payload: Payload | None = payload) -> bool:
                return payload is not None and cache.promote(table, ahead(table.cached + size), payload)

            if not await outcome_of(self._engine.between_steps(table, promote)):
                break
        return table.cached

    def close(self) -> None:
        """Give the pages back, at once or at the end of the running step, whose stream then raises RuntimeClosed."""
        self._finalizer.detach()
        self._engine.close_table(self._table)

    def _check_idle(self) -> None:
        if self._table.closed:
            raise RuntimeClosed("the sequence is closed")
        if self._request is not None and not self._request.cancelled:
            raise SessionBusy("a stream of this sequence is open; leave its `async with` block first, or fork before")

    def _settle(self) -> None:
        """Forget what the last call computed beyond the tokens that were taken from its stream."""
        request = self._request
        if request is None or not request.ended:
            return  # or its last step still runs; `generate` waits for that
        self._request = None
        self._engine.cut(self._table, request.prompt + request.taken)

    async def _wait(self) -> Ended | None:
        """Until the last call, if its end was not seen yet, has let go. Its tokens that nobody took are lost."""
        while self._request is not None:
            item = await self._request.mailbox.get()
            if isinstance(item, Ended):
                self._settle()
                return item
        return None

    def _begin(self, sampling: Sampling, guide: Guide | None) -> Request:
        if not len(self._tokens):
            raise ValueError("the sequence is empty; append a prompt first")
        stop = self._runtime.stop_tokens if sampling.stop is None else sampling.stop
        request = Request(
            self._table, self._tokens, list(self._runs), sampling, stop, guide, self.priority, self._logits
        )
        self._engine.submit(request)
        self._request = request
        return request

    def _take(self, token: Token) -> None:
        self._tokens.append(token.id)
        self._logits = None

    def _seen(self, end: Ended) -> None:
        self._settle()
        if end.logits is not None:
            self._logits = end.logits


class TokenStream:
    """Made by `Sequence.generate`; an async context manager, and inside it an async iterator of `Token`."""

    def __init__(self, sequence: Sequence, sampling: Sampling, guide: Guide | None = None) -> None:
        self.sampling = sampling
        self._guide = guide
        self.finish: str | None = None  # "stop", "length", "cancelled" or "error", once it is known
        self._sequence = sequence
        self._request: Request | None = None

    @property
    def usage(self) -> Usage:
        """What the call used so far."""
        return Usage() if self._request is None else self._request.usage()

    async def __aenter__(self) -> TokenStream:
        if self._request is not None:
            raise RuntimeError("a stream can be entered once; call generate again")
        self._sequence._check_idle()
        await self._sequence._wait()
        self._request = self._sequence._begin(self.sampling, self._guide)
        # A stream that is dropped without being left must not generate on.
        weakref.finalize(self, self._request.cancel).atexit = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._request is not None
        if self.finish is None:
            self._request.cancel()
            end = None
            with anyio.CancelScope(shield=True):  # one step at most
                end = await self._sequence._wait()
            complete = end is not None and end.error is None and self._request.taken == self._request.made
            self.finish = end.finish if end is not None and complete else "cancelled"

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        if self._request is None:
            raise RuntimeError("use the stream inside its block: async with sequence.generate() as stream: …")
        if self.finish is not None:
            raise StopAsyncIteration
        item = await self._request.mailbox.get()
        if isinstance(item, Token):
            self._request.taken += 1
            self._sequence._take(item)
            return item
        self._sequence._seen(item)
        self.finish = item.finish
        if item.error is not None:
            raise item.error
        raise StopAsyncIteration
