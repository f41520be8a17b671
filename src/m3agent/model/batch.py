"""What a forward pass takes: spans, each the next tokens of one sequence with the pages that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from m3agent.kernels.msa import Paged
from m3agent.model.pages import KVPages


@dataclass
class Span:
    """The next n tokens of a sequence.

    ids: [n] int64; start: how many tokens the pages hold already; table: [p] int64, page ids that cover start + n
    tokens in order; media: (offset in the span, rows [m, hidden]) pairs that replace the embeddings of placeholders.
    """

    ids: Tensor
    start: int
    table: Tensor
    media: list[tuple[int, Tensor]] = field(default_factory=list[tuple[int, Tensor]])

    @property
    def end(self) -> int:
        """Tokens in the cache after this span."""
        return self.start + self.ids.shape[0]

    @cached_property
    def first_page(self) -> int | None:
        """The first page id if the pages stand in a row, so that slices can replace gathers; else None."""
        first, count = int(self.table[0]), self.table.shape[0]
        if count == 1:
            return first
        if int(self.table[-1]) - first != count - 1:
            return None
        row = torch.arange(first, first + count, device=self.table.device)
        return first if torch.equal(self.table, row) else None


@dataclass(frozen=True)
class Placed:
    """A span's place in the batch (rows `begin` to `end`) and in the pages (`slots`: one flat slot a token)."""

    span: Span
    begin: int
    end: int
    slots: slice | Tensor


@dataclass(frozen=True)
class Together:
    """Spans of equal length in a row, rows `begin` to `end`, which a GPU takes in one go."""

    begin: int
    end: int
    paged: Paged


class Batch(list[Placed]):
    """The placed spans of one forward pass."""

    @cached_property
    def groups(self) -> list[Together]:
        """One-token spans in a row together, every other span by itself. The same for all layers: made once."""
        groups: list[list[Placed]] = []
        for p in self:
            single = p.end - p.begin == 1
            if single and groups and groups[-1][0].end - groups[-1][0].begin == 1:
                groups[-1].append(p)
            else:
                groups.append([p])
        return [Together(g[0].begin, g[-1].end, _paged([p.span for p in g])) for g in groups]


def _paged(spans: list[Span]) -> Paged:
    device = spans[0].table.device
    tables = torch.nn.utils.rnn.pad_sequence([span.table for span in spans], batch_first=True)
    starts = torch.tensor([span.start for span in spans]).to(device)
    return Paged(tables, starts, max(span.end for span in spans))


def place(spans: list[Span], pages: KVPages) -> Batch:
    """Check the spans against the pages and find every token's slot. Raises ValueError on a span that cannot run."""
    placed = Batch()
    begin = 0
    block = pages.block_size
    for span in spans:
        n = span.ids.shape[0]
        if n == 0:
            raise ValueError("a span needs at least one token")
        if span.table.shape[0] * block < span.end:
            raise ValueError(f"{span.table.shape[0]} pages of {block} tokens cannot hold {span.end} tokens")
        if span.first_page is not None:
            first = span.first_page * block + span.start
            slots: slice | Tensor = slice(first, first + n)
        else:
            positions = torch.arange(span.start, span.end, device=span.table.device)
            slots = span.table[positions // block] * block + positions % block
        placed.append(Placed(span, begin, begin + n, slots))
        begin += n
    return placed
