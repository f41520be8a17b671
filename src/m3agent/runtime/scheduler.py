"""What the next step computes: every running decode, and as much of the prompts as these can bear beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m3agent.runtime.request import Request

CHUNK = 256  # tokens, on a CPU: more of them gain nothing
GPU_CHUNK = 8192  # a large model's experts need as many rows to be worth their bytes
SHORT = 1024  # tokens; a prompt with no more new ones is done soon, and does not wait for the pace of long ones
PIECE = 64  # tokens of a short prompt in a step with decodes, at least
SLOWER = 1.8  # a step with prompt tokens takes so many times as long as one without, on average


@dataclass(frozen=True)
class Work:
    """The next `count` pending tokens of one request, and behind them tokens that it may say next."""

    request: Request
    count: int
    draft: Sequence[int] = ()


class Pace:
    """How many prompt tokens go into a step beside running decodes, found by measuring steps."""

    REFRESH = 32  # steps with prompt tokens; then one without tells what that takes by now

    def __init__(self) -> None:
        self._tokens = 8.0
        self._mixed = 0

    def tokens(self, plain: float | None) -> int:
        """For the next step. plain: the seconds of one without prompt tokens; None where that is not known."""
        if plain is None or self._mixed >= self.REFRESH:
            self._mixed = 0
            return 0
        return int(self._tokens)

    def learn(self, tokens: int, seconds: float, plain: float) -> None:
        """A step with so many prompt tokens took so long."""
        self._mixed += 1
        faster = SLOWER * plain / seconds
        if faster < 1 or tokens >= int(self._tokens):  # one that was not full tells nothing of more
            self._tokens = max(1.0, self._tokens * min(max(faster, 0.5), 1.25))


def plan(active: list[Request], chunk: int, beside: int) -> list[Work]:
    """The work of one step. Prompts come by priority, and take turns: those that got tokens move to the end.

    chunk: prompt tokens of a step, where it has no decodes. A prompt is then cut at the multiples of this and never
    smaller to fit in: so how a lone one is cut depends on positions alone, and with it the rounding of its results.
    beside: prompt tokens of a step with decodes; a short prompt may have more, since all of them together take longer
    the smaller the pieces are.
    """
    work = [Work(request, 1) for request in active if len(request.pending) == 1]
    decodes = bool(work)
    budget = beside if decodes else chunk
    prompts = [request for request in active if len(request.pending) > 1]
    for request in sorted(prompts, key=lambda request: -request.priority):
        count = min(len(request.pending), chunk - request.table.cached % chunk)
        if decodes:
            whole = request.computed + len(request.pending)
            count = min(count, max(budget, PIECE) if whole <= SHORT and budget == beside > 0 else budget)
        if 0 < count <= max(budget, PIECE if decodes else 0):
            budget = max(0, budget - count)
            work.append(Work(request, count))
            active.remove(request)
            active.append(request)
    return work
