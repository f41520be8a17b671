"""The step loop: one worker thread owns the model and the pages, and serves all requests of a runtime."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from m3agent.errors import ContextOverflow, Overloaded, RuntimeClosed, SessionBusy
from m3agent.model.m3 import M3Model
from m3agent.model.pages import KVPages
from m3agent.runtime.cores import Cores
from m3agent.runtime.kv import BlockTable, KVCache
from m3agent.runtime.kv.keys import root_key
from m3agent.runtime.kv.tiers import Tiers
from m3agent.runtime.meter import Rates
from m3agent.runtime.queues import Fetched, Queues
from m3agent.runtime.request import Ended, Request
from m3agent.runtime.steps import Steps
from m3agent.runtime.usage import SequenceStats, Stats

T = TypeVar("T")
Job = tuple[Callable[[], Any], Future[Any]]


class Engine:
    """Starts its thread at once. `submit`, `close_table`, `drop`, `stop` and `stats` may be called from any thread."""

    def __init__(
        self,
        model: M3Model,
        pages: KVPages,
        *,
        context: int,
        tiers: Tiers | None = None,
        eight_bit: bool = False,
        max_active: int | None = None,
        max_waiting: int | None = None,
    ) -> None:
        self._inbox: SimpleQueue[Request | Fetched | Job | None] = SimpleQueue()
        kind = f"{model.dtype}, 8 bits below" if eight_bit else str(model.dtype)
        root = root_key(model.fingerprint, kind, pages.block_size)
        self.cache = KVCache(pages, root, self._relax_one, tiers, eight_bit)
        self.context = context
        self._dropped: deque[BlockTable] = deque()  # from finalizers, which may take no lock
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._most = None if max_active is None or max_waiting is None else max_active + max_waiting
        self._busy: dict[int, Request] = {}  # by id of the table
        self._queues = Queues(self.cache, self._inbox.put, max_active)
        self._steps = Steps(model, self.cache, self._queues, context, self._end)
        self._tables: weakref.WeakSet[BlockTable] = weakref.WeakSet()
        self._uses = count(1)
        self._prompts = self._reused = 0  # tokens of the calls that have ended
        self.ended: Callable[[Request, str, BaseException | None], None] | None = None  # is told of each call
        self.stopped = self.closing = False
        self._idle = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._work, name="m3agent-engine", daemon=True)
        self._thread.start()
        # A daemon thread inside torch while the interpreter goes down can crash it: end it before.
        atexit.register(self.stop_and_wait)

    def new_table(self) -> BlockTable:
        table = self.cache.new_table()
        with self._lock:
            self._tables.add(table)
        return table

    def submit(self, request: Request) -> None:
        """Hand a request to the worker, and its table until the request has ended.

        Raises RuntimeClosed when the runtime or the sequence is closed, SessionBusy when the table has a request,
        Overloaded when too many are waiting.
        """
        if os.getpid() != self._process:  # threads do not survive a fork: nobody would ever answer
            raise RuntimeClosed("the runtime was opened before this process was forked; open another one in here")
        with self._lock:
            if self.stopped or self.closing:
                raise RuntimeClosed("the runtime is closed")
            if request.table.closed:
                raise RuntimeClosed("the sequence is closed")
            if id(request.table) in self._busy:
                raise SessionBusy("this sequence generates already; fork it, or wait for the first call")
            if self._most is not None and len(self._busy) >= self._most:
                raise Overloaded(f"{len(self._busy)} calls run or wait already, as many as the runtime was opened for")
            request.begin()
            request.table.used = next(self._uses)
            self._busy[id(request.table)] = request
            self._inbox.put(request)

    def between_steps(self, table: BlockTable, work: Callable[[], T]) -> Future[T]:
        """Have the worker do something with an idle table. The future raises RuntimeClosed, SessionBusy, and what the
        work raises.
        """
        future: Future[T] = Future()

        def alone() -> T:
            if table.closed:
                raise RuntimeClosed("the sequence is closed")
            if id(table) in self._busy:
                raise SessionBusy("this sequence generates; wait for its call")
            return work()

        with self._lock:
            if self.stopped:
                raise RuntimeClosed("the runtime is closed")
            self._inbox.put((alone, future))
        return future

    def close_table(self, table: BlockTable) -> None:
        """Give a sequence's pages back: now, or, while a request runs on it, at the end of the running step."""
        with self._lock:
            if table.closed:
                return
            table.closed = True
            running = self._busy.get(id(table))
            if running is None:
                table.release()
            else:
                running.cancel()

    def drop(self, table: BlockTable) -> None:
        """`close_table` for finalizers, which may run in any thread at any point: it is done a little later."""
        self._dropped.append(table)

    def reap(self) -> None:
        """Close the tables that were dropped."""
        while self._dropped:
            try:
                table = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            self.close_table(table)

    def fork(self, table: BlockTable) -> BlockTable:
        """A copy of an idle table, on the same pages."""
        with self._lock:
            if self.stopped or table.closed:
                raise RuntimeClosed("the runtime is closed" if self.stopped else "the sequence is closed")
            if id(table) in self._busy:
                raise SessionBusy("this sequence generates; fork it before or after")
            other = table.fork()
            self._tables.add(other)
            return other

    def cut(self, table: BlockTable, tokens: int) -> None:
        """Forget what an idle table holds beyond its first `tokens`."""
        with self._lock:
            if not table.closed:
                table.cut(tokens)

    def stats(self) -> Stats:
        self.reap()
        pool, tiers, steps = self.cache.pool, self.cache.tiers, self._steps
        return Stats(
            total_pages=pool.total,
            used_pages=pool.used if self._thread.is_alive() else 0,  # their memory went with the worker
            cached_pages=pool.cached if self._thread.is_alive() else 0,
            page_tokens=self.cache.page_tokens,
            active_requests=len(self._queues.active),
            waiting_requests=max(0, len(self._busy) - len(self._queues.active)),
            steps=steps.count,
            prompt_tokens=self._prompts,
            reused_tokens=self._reused,
            computed_tokens=steps.computed,
            recomputed_tokens=steps.recomputed,
            found_tokens=self._queues.found,
            promoted_tokens=self._queues.promoted,
            output_tokens=steps.output,
            drafted_tokens=steps.drafted,
            accepted_tokens=steps.accepted,
            evicted_pages=self.cache.index.evicted,
            preemptions=self._queues.preempted,
            host_pages=len(tiers.host) if tiers is not None else 0,
        )

    def drain(self, seconds: float | None) -> None:
        """Take no more requests, and wait until the ones that there are have ended, for so long at most."""
        with self._idle:
            self.closing = True
            self._idle.wait_for(lambda: self.stopped or not self._busy, seconds)

    def rates(self) -> Rates:
        return self._steps.meter.rates()

    def sequences(self) -> list[SequenceStats]:
        """Of all open sequences, those in use first."""
        self.reap()
        pool = self.cache.pool
        active = set(map(id, (request.table for request in list(self._queues.active))))
        found: list[SequenceStats] = []
        with self._lock:
            for table in sorted(self._tables, key=lambda table: -table.used):
                if table.closed:
                    continue
                pages, request = list(table.pages), self._busy.get(id(table))
                state = "running" if id(table) in active else "idle" if request is None else "waiting"
                tokens = table.cached if request is None else table.cached + len(request.pending)
                shared = sum(pool.shared(page) for page in pages)
                found.append(SequenceStats(table.name, state, tokens, table.cached, len(pages), shared))
        return found

    def stop(self) -> None:
        """End the worker after its running step; every request ends with RuntimeClosed. Does not wait.

        Takes no lock, so that a finalizer may call it.
        """
        self.stopped = True
        self._inbox.put(None)

    def stop_and_wait(self) -> None:
        """`stop`, then wait until the worker has ended: as long as one step takes."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        error = RuntimeClosed("the runtime was closed")
        try:
            cores = Cores()
            with torch.inference_mode():
                while self._receive():
                    self._steps.run(cores)
        except BaseException as failure:  # a fault of the engine itself: nobody may wait for it forever
            error = RuntimeClosed(f"the runtime's worker failed: {failure!r}")
            error.__cause__ = failure
        finally:
            self._shut(error)

    def _shut(self, error: RuntimeClosed) -> None:
        with self._lock:
            self.stopped = True
            self._idle.notify_all()
            left = list(self._busy.values())
        for request in left:
            self._end(request, "error", error)
        with suppress(Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, tuple) and item[1].set_running_or_notify_cancel():
                    item[1].set_exception(error)
        if self.cache.tiers is not None:
            self.cache.tiers.close()
        # The memory goes back now, whoever still holds a sequence.
        del self._steps.model, self._steps.features, self.cache.pages
        atexit.unregister(self.stop_and_wait)

    def _receive(self) -> bool:
        """Take in new requests, waiting for one when there is nothing to do; False when the engine was stopped."""
        wait = not self._queues.runnable
        while not self.stopped:
            try:
                item = self._inbox.get(block=wait)
            except Empty:
                break
            if isinstance(item, Fetched):
                self._alone(item.request, partial(self._queues.promote, item))
            elif isinstance(item, tuple):
                _do(*item)
            elif item is not None:
                self._admit(item)
            wait = not self._queues.runnable
        self.reap()
        for request in [request for request in self._queues.all if request.cancelled]:
            self._end(request, "cancelled")
        for request in self._queues.resume(self._idle_pages):
            self._start(request)
        return not self.stopped

    def _admit(self, request: Request) -> None:
        tokens, room = request.prompt, self.cache.pool.total * self.cache.page_tokens
        full = self._queues.full
        (self._queues.waiting if full else self._queues.active).append(request)
        if tokens > self.context:
            problem = f"the prompt of {tokens} tokens is longer than the model's context of {self.context}"
            self._end(request, "error", ContextOverflow(problem))
        elif tokens > room:
            problem = f"the prompt of {tokens} tokens is larger than the whole KV cache of {room}; raise cache_tokens"
            self._end(request, "error", ContextOverflow(problem))
        elif not full:
            self._start(request)

    def _start(self, request: Request) -> None:
        """A request has become active."""
        if request.pending:
            self._alone(request, partial(self._queues.find, request))
        else:
            assert request.logits is not None
            self._steps.sample(request, request.logits)

    def _alone(self, request: Request, work: Callable[[], None]) -> None:
        """Do something for one request; when it fails, this request ends and the others go on."""
        try:
            work()
        except Exception as error:
            self._end(request, "error", error)

    def _idle_pages(self) -> int:
        """How many pages sequences hold that generate nothing, at most."""
        with self._lock:
            return sum(len(table.pages) for table in self._tables if id(table) not in self._busy)

    def _relax_one(self) -> bool:
        """For the cache: take the pages of the sequence that was idle for longest."""
        self.reap()
        with self._lock:
            idle = [table for table in self._tables if table.pages and id(table) not in self._busy]
            if not idle:
                return False
            min(idle, key=lambda table: table.used).release()
            return True

    def _end(
        self, request: Request, finish: str, error: BaseException | None = None, logits: Tensor | None = None
    ) -> None:
        """Let go of the request's sequence and tell its reader."""
        self._queues.remove(request)
        self.cache.settle(request.table)
        with self._lock:
            self._busy.pop(id(request.table), None)
            self._idle.notify_all()
            request.end()
            self._prompts += request.prompt
            self._reused += request.reused
            if request.table.closed:
                request.table.release()
                error = error or RuntimeClosed("the sequence was closed")
        if self.ended is not None:
            self.ended(request, finish, error)
        request.mailbox.put(Ended(finish, error, logits))


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
