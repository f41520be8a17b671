"""Decode steps as captured graphs: one launch from the host instead of a hundred and more.

A graph is made for a number of sequences and of pages, both rounded up to a power of two, when a step of that size
comes for the second time; the first one runs as it is, which also compiles its kernels. Rows that fill up a batch
repeat its last one: they write the same numbers into the same slot, and their logits are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.kernels.msa import Paged
from m3agent.model.batch import Span, check
from m3agent.model.config import TextConfig
from m3agent.model.fused import Inputs, Rope, Together, head_logits, hidden_states
from m3agent.model.pages import KVPages
from m3agent.model.weights import Weights

# More sequences in one step run without a graph: their kernels take longer than their launches.
MOST = 128
# The smallest number of pages that a graph is made for.
FEWEST_PAGES = 16


@dataclass(frozen=True)
class Captured:
    """numbers: int64 on the device, the ids of all sequences, their positions, their slots, their page tables; logits:
    what comes of them.
    """

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model on one set of pages; they hold the addresses of both."""

    def __init__(self, w: Weights, t: TextConfig, rope: Rope, pages: KVPages) -> None:
        self.rope, self.pages = rope, pages
        self._w, self._t = w, t
        self._seen: set[tuple[int, int]] = set()
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._memory: Any = None  # a pool of the allocator: all graphs share it: no two of them run at once

    def logits(self, spans: Sequence[Span]) -> Tensor | None:
        """float32 [spans, vocab] of one-token spans without pictures; None where no graph serves. Valid until the next
        call.
        """
        if (
            not self.pages.k[0].is_cuda
            or len(spans) > MOST
            or any(span.ids.shape[0] != 1 or span.media for span in spans)
        ):
            return None
        check(spans, self.pages.block_size)
        used = max(span.end - 1 for span in spans) // self.pages.block_size + 1
        size = (_power(len(spans)), max(FEWEST_PAGES, _power(used)))
        if size not in self._seen:
            self._seen.add(size)
            return None
        if size not in self._graphs:
            self._graphs[size] = self._capture(*size)
        captured = self._graphs[size]
        captured.numbers.copy_(numbers_of(spans, *size, self.pages.block_size), non_blocking=True)
        captured.graph.replay()
        return captured.logits[: len(spans)]

    def _capture(self, sequences: int, pages: int) -> Captured:
        numbers = torch.zeros(sequences * (3 + pages), dtype=torch.int64, device=self.pages.k[0].device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = step(numbers, sequences, self._w, self._t, self.rope, self.pages)
        self._memory = graph.pool()
        return Captured(graph, numbers, logits)


def step(numbers: Tensor, sequences: int, w: Weights, t: TextConfig, rope: Rope, pages: KVPages) -> Tensor:
    """One token of each sequence, its numbers as in `Captured` → logits [sequences, vocab]."""
    ids, positions, slots = numbers[: 3 * sequences].split(sequences)
    tables = numbers[3 * sequences :].view(sequences, -1)
    longest = tables.shape[1] * pages.block_size  # what is launched covers as many; each sequence says how far it goes
    together = Together(0, sequences, Paged(tables, positions, longest))
    x = F.embedding(ids, w.embed)
    return head_logits(*hidden_states(x, Inputs(ids, positions, slots, [together]), w, t, rope, pages), w, t)


def numbers_of(spans: Sequence[Span], sequences: int, pages: int, block: int) -> Tensor:
    """On the host, in memory that a GPU can fetch from by itself."""
    count = len(spans)
    packed = torch.zeros(sequences * (3 + pages), dtype=torch.int64, pin_memory=torch.cuda.is_available())
    numbers = packed.numpy()
    ids, positions, slots = numbers[: 3 * sequences].reshape(3, sequences)
    tables = numbers[3 * sequences :].reshape(sequences, pages)
    for row, span in enumerate(spans):
        table = span.table[:pages].cpu().numpy()
        tables[row, : table.shape[0]] = table
        ids[row], positions[row] = span.ids.item(), span.start
        slots[row] = tables[row, span.start // block] * block + span.start % block
    for rows in (ids, positions, slots, tables):
        rows[count:] = rows[count - 1]
    return packed


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
