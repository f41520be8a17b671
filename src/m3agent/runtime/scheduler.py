"""What the next step computes: every running decode, and prefill chunks under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m3agent.runtime.request import Request

CHUNK = 256  # tokens; a prompt is cut at the multiples of this, whatever was cached before


@dataclass(frozen=True)
class Work:
    """The next `count` pending tokens of one request, and behind them tokens that it may say next."""

    request: Request
    count: int
    draft: Sequence[int] = ()


def plan(active: list[Request], chunk: int = CHUNK) -> list[Work]:
    """The work of one step; those in `active` that got a prefill chunk move to its end, so that prompts take turns.

    A chunk is never made smaller to fit in: how a prompt is cut depends on positions alone, and with it the rounding
    of its results.
    """
    work = [Work(request, 1) for request in active if len(request.pending) == 1]
    budget = chunk
    for request in [request for request in active if len(request.pending) > 1]:
        cached = request.table.cached
        count = min(len(request.pending), chunk - cached % chunk)
        if count <= budget:
            budget -= count
            work.append(Work(request, count))
            active.remove(request)
            active.append(request)
    return work
