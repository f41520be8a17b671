"""One step: a pass of the model over the work of many requests, and the tokens that come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from m3agent.errors import ContextOverflow
from m3agent.model.batch import Span
from m3agent.model.flops import span_flops
from m3agent.model.m3 import M3Model
from m3agent.runtime.cores import Cores
from m3agent.runtime.features import FeatureCache
from m3agent.runtime.kv import KVCache
from m3agent.runtime.meter import Meter, StepTime
from m3agent.runtime.queues import Queues
from m3agent.runtime.request import Request, Token
from m3agent.runtime.sampling import choose
from m3agent.runtime.scheduler import CHUNK, GPU_CHUNK, Pace, Work, plan
from m3agent.runtime.shortlist import WIDTH, Shortlist, choose_short, shortlists
from m3agent.runtime.speculate import LENGTHS, Speculation

# end(request, finish, error, logits)
End = Callable[[Request, str, BaseException | None, Tensor | None], None]


class Steps:
    """For the worker alone; it is made in the worker's thread. The counts are those of `Stats`."""

    def __init__(self, model: M3Model, cache: KVCache, queues: Queues, context: int, end: End) -> None:
        self.model = model
        self.features = FeatureCache(model.encode_media)
        self.count = self.computed = self.recomputed = self.output = self.drafted = self.accepted = 0
        self._cache = cache
        self._queues = queues
        self._context = context
        self._end = end
        self.speculates = True
        self.meter = Meter()
        self._text = model.config.text
        self._speculation = Speculation()
        self._pace = Pace()
        self._chunk = CHUNK if model.device.type == "cpu" else GPU_CHUNK

    def run(self, cores: Cores) -> None:
        """Prepare the work, run it as one batch, choose a token where a prompt is done."""
        active, costs = self._queues.active, self._speculation.costs
        plain = costs.plain(sum(len(request.pending) == 1 for request in active))
        planned = plan(active, self._chunk, self._pace.tokens(plain))
        if self.speculates and all(len(piece.request.pending) == 1 for piece in planned):
            planned = self._with_drafts(planned)
        if any(piece.count > 1 or piece.draft for piece in planned):
            cores.take_all()
        else:
            cores.leave_one()
        prepared: list[tuple[Work, Span]] = []
        for piece in planned:
            span = self._span(piece) if piece.request in active else None
            if span is not None:
                prepared.append((piece, span))
        prepared = [(piece, span) for piece, span in prepared if piece.request in active]  # some gave way
        if not prepared:
            return
        work, spans = [piece for piece, _ in prepared], [span for _, span in prepared]
        decodes = sum(len(piece.request.pending) == 1 for piece in work)
        self.count += 1
        began, said = time.perf_counter(), self.output
        flops = sum(span_flops(self._text, span.start, span.ids.shape[0]) for span in spans)
        outputs = self._forward(work, spans)
        for piece, logits, best in zip(work, outputs, self._likeliest(work, outputs), strict=True):
            if logits is not None:
                self._take(piece, logits, best)
        seconds = time.perf_counter() - began
        prompts = sum(piece.count for piece in work) - decodes
        self.meter.learn(StepTime(began, seconds, prompts, self.output - said, flops))
        if decodes == len(work):
            costs.learn(decodes, sum(1 + len(piece.draft) for piece in work), seconds)
        elif plain is not None:
            self._pace.learn(prompts, seconds, plain)

    def sample(self, request: Request, logits: Tensor, best: Shortlist | None = None) -> None:
        """The next token of a request, from logits [vocab] on any device, or from the likeliest alone."""
        if request.sampling.max_tokens == 0:
            self._end(request, "length", None, logits.to("cpu", torch.float32))
        elif (token := self._chosen(request, logits, best)) is not None:
            self._emit(request, token)

    def _chosen(self, request: Request, logits: Tensor, best: Shortlist | None = None) -> Token | None:
        try:
            allowed = None if request.guide is None else request.guide.allowed()
            found = None
            if best is not None and allowed is None:
                found = choose_short(best, request.sampling, request.random)
            if found is None:
                row = logits.to("cpu", torch.float32).numpy()
                found = choose(row, request.sampling, request.random, allowed)
            token, logprob = found
            if request.guide is not None:
                request.guide.accept(token)
            return Token(token, logprob)
        except Exception as error:
            self._end(request, "error", error, None)
            return None

    def _emit(self, request: Request, token: Token) -> None:
        self.output += 1
        request.emit(token)
        if token.id in request.stop:
            self._end(request, "stop", None, None)
        elif request.made == request.sampling.max_tokens:
            self._end(request, "length", None, None)

    def _likeliest(self, work: list[Work], outputs: list[Tensor | None]) -> list[Shortlist | None]:
        """On a GPU, for the pieces that end in a token without having been drafted."""
        found: list[Shortlist | None] = [None] * len(work)
        if self.model.device.type != "cuda":
            return found
        last = {
            number: logits[-1]
            for number, (piece, logits) in enumerate(zip(work, outputs, strict=True))
            if logits is not None and not piece.draft and piece.count == len(piece.request.pending)
        }
        if last:
            greedy = all(work[number].request.sampling.temperature == 0.0 for number in last)
            rows = torch.stack([*last.values()]) if len(last) > 1 else next(iter(last.values()))[None]
            for number, best in zip(last, shortlists(rows, 1 if greedy else WIDTH), strict=True):
                found[number] = best
        return found

    def _take(self, piece: Work, logits: Tensor, best: Shortlist | None) -> None:
        """What came of one piece of work."""
        request = piece.request
        prefill = not request.made
        again = request.advance(piece.count, self._cache.advance)
        if prefill:
            self.computed += piece.count
            self.recomputed += again
        if request.pending or request.cancelled:
            return
        if piece.draft:
            self._check(request, piece.draft, logits.to("cpu", torch.float32))
        else:
            self.sample(request, logits[-1], best)

    def _check(self, request: Request, draft: Sequence[int], rows: Tensor) -> None:
        """rows: logits [1 + drafted, vocab]. A drafted token stands when it is the one that is chosen in its place: so
        every token is chosen as it would be without drafts, and with the same random number.
        """
        request.drafted += len(draft)
        self.drafted += len(draft)
        matched = request.draft.matched
        for place, row in enumerate(rows):
            token = self._chosen(request, row)
            if token is None:
                return
            stands = place < len(draft) and token.id == draft[place]
            if place < len(draft):
                self._speculation.trust.learn(matched + place, stands)
            request.accepted += stands
            self.accepted += stands
            self._emit(request, token)
            if not stands or request.ended:
                return
            request.advance(1, self._cache.advance)

    def _with_drafts(self, work: list[Work]) -> list[Work]:
        """For a step in which all requests say one token each: the drafts that make it say more in less time."""
        drafts = [piece.request.draft.propose(piece.request.emitted, self._room(piece.request)) for piece in work]
        found = [(piece.request.draft.matched, len(draft)) for piece, draft in zip(work, drafts, strict=True)]
        lengths = self._speculation.lengths(found)
        chosen = zip(work, drafts, lengths, strict=True)
        return [replace(piece, draft=draft[:length]) if length else piece for piece, draft, length in chosen]

    def _room(self, request: Request) -> int:
        """How many drafted tokens may be checked: within all limits, and on pages that nobody has to give up."""
        table, pool, size = request.table, self._cache.pool, self._cache.page_tokens
        limit = request.sampling.max_tokens
        most = min(LENGTHS[-1], self._context - table.cached - 1)
        if limit is not None:
            most = min(most, limit - request.made - 1)
        if pool.free < len(self._queues.active):
            most = min(most, len(table.pages) * size - table.cached - 1)
        return max(most, 0)

    def _span(self, piece: Work) -> Span | None:
        """Pages and picture rows for one piece of work; None when that failed, which ends this request alone."""
        request, table = piece.request, piece.request.table
        start, end = table.cached, table.cached + piece.count
        try:
            if end > self._context:
                raise ContextOverflow(f"the model's context of {self._context} tokens is full")
            media = self.features.inside(request.runs, start, end) if request.runs else []
            if not self._queues.reserve(request, end + len(piece.draft)):
                return None
            # On the host: a GPU's batch goes over in one copy.
            ids = torch.tensor([*request.pending[: piece.count], *piece.draft])
            return Span(ids, start, table.tensor(ids.device), media)
        except Exception as error:
            self._end(request, "error", error, None)
            return None

    def _forward(self, work: list[Work], spans: list[Span]) -> list[Tensor | None]:
        """The logits of every span, None where there are none. When the batch fails, each span is tried alone and only
        the faulty ones end; one for which the memory was too small comes again, in smaller pieces.
        """
        try:
            return list(self.model.forward(spans, self._cache.pages, [1 + len(piece.draft) for piece in work]))
        except Exception as error:
            if len(work) == 1:
                if not (out_of_memory(error) and self._shrink(work[0])):
                    self._end(work[0].request, "error", error, None)
                return [None]
        return [self._forward([piece], [span])[0] for piece, span in zip(work, spans, strict=True)]

    def _shrink(self, piece: Work) -> bool:
        """Smaller steps from now on; False when this one is the smallest."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if piece.draft:
            self.speculates = False
        elif piece.count > 1:
            self._chunk = max(1, min(self._chunk, piece.count) // 2)
        else:
            return False
        return True


def out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator has no class of its own for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
