"""What a forward pass takes: spans, each the next tokens of one sequence with the pages that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

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

    def to(self, device: torch.device) -> Span:
        """The same with ids and table there."""
        if self.ids.device == self.table.device == device:
            return self
        return Span(self.ids.to(device), self.start, self.table.to(device), self.media)

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


Batch = list[Placed]


def check(spans: Sequence[Span], block: int) -> None:
    """Raises ValueError on a span that cannot run."""
    for span in spans:
        if span.ids.shape[0] == 0:
            raise ValueError("a span needs at least one token")
        if span.table.shape[0] * block < span.end:
            raise ValueError(f"{span.table.shape[0]} pages of {block} tokens cannot hold {span.end} tokens")


def place(spans: list[Span], pages: KVPages) -> Batch:
    """Check the spans against the pages and find every token's slot. Raises ValueError on a span that cannot run."""
    placed: Batch = []
    begin = 0
    block = pages.block_size
    check(spans, block)
    for span in spans:
        n = span.ids.shape[0]
        if span.first_page is not None:
            first = span.first_page * block + span.start
            slots: slice | Tensor = slice(first, first + n)
        else:
            positions = torch.arange(span.start, span.end, device=span.table.device)
            slots = span.table[positions // block] * block + positions % block
        placed.append(Placed(span, begin, begin + n, slots))
        begin += n
    return placed


def place_media(x: Tensor, spans: Sequence[Span]) -> None:
    """Put each span's media rows in place of its embeddings, x [tokens, hidden]. Raises ValueError if they leave it."""
    begin = 0
    for span in spans:
        count = span.ids.shape[0]
        for offset, rows in span.media:
            if offset < 0 or offset + rows.shape[0] > count:
                raise ValueError(f"{rows.shape[0]} media rows at {offset} leave their span of {count} tokens")
            x[begin + offset : begin + offset + rows.shape[0]] = rows.to(x.dtype)
        begin += count


def wanted_rows(spans: Sequence[Span], logits: str | Sequence[int]) -> tuple[list[int], list[int]]:
    """How many of each span's last tokens get logits ("last", "all", or a number for each), and where all these stand
    in the batch.
    """
    sizes = [span.ids.shape[0] for span in spans]
    rows = list(logits) if not isinstance(logits, str) else sizes if logits == "all" else [1] * len(spans)
    ends = accumulate(sizes)
    return rows, [place for end, count in zip(ends, rows, strict=True) for place in range(end - count, end)]
