"""`RunOptions`: what a run can be told, for every way of starting one; `Setup`: what a session has from its agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from m3agent.approval import Approve, Decision
from m3agent.compaction import Compaction
from m3agent.events import Event
from m3agent.hooks import Hooks
from m3agent.limits import Limits, Price

if TYPE_CHECKING:
    from m3agent.runtime import Sampling


class RunOptions(TypedDict, total=False):
    """Options of one run, the same for `run`, `stream` and `run_sync`. None, or none given, takes the agent's own.

    max_turns: the limit on model turns.
    max_tokens: the limit on generated tokens over all turns.
    max_seconds: the limit on the time of the whole run, calls of tools and slow readers included.
    max_cost: the limit on what the run costs, by the agent's `price`.
    priority: whose prompts are computed first when several sessions run; 0 where none is given, a higher one first.
    sampling: how the next token is chosen.
    deps: anything; tools find it in `Context.deps`.
    approve: decides about calls of tools that need approval: a callback, `approve(call)` or `approve(call, context)`,
        that returns True, False or a reason, or the decisions about `session.pending`, by call id.
    on_event: called with every event, before an iterator yields it; a plain function or an async one.

    A limit that is reached is no error: `reply.stop` says so, and the session can go on.
    """

    max_turns: int | None
    max_tokens: int | None
    max_seconds: float | None
    max_cost: float | None
    priority: int | None
    sampling: Sampling | None
    deps: Any
    approve: Approve | Mapping[str, Decision] | None
    on_event: Callable[[Event], Awaitable[object] | object] | None


Keep = Callable[[Any], Awaitable[None]]  # of a History


@dataclass(frozen=True)
class Setup:
    """What the runs of a session have from its agent: options they need not be given, and what no run changes."""

    defaults: RunOptions
    hooks: Hooks = field(default_factory=Hooks)
    price: Price | None = None
    guided: bool = True
    compaction: Compaction | None = None
    trace_content: bool = False
    keep: Keep | None = None  # called after every turn, and after the results of its calls

    def options(self, given: Mapping[str, Any]) -> RunOptions:
        """Those of a run. Raises TypeError, which names options that do not exist."""
        known = RunOptions.__annotations__
        unknown = [name for name in given if name not in known]
        if unknown:
            raise TypeError(f"a run has no option {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
        told = {name: value for name, value in given.items() if value is not None}
        return RunOptions(**{**self.defaults, **told})  # pyright: ignore[reportArgumentType]

    def limits(self, options: RunOptions) -> Limits:
        """Raises ValueError for limits that leave nothing, or for a cost without a price."""
        turns = options.get("max_turns")
        assert turns is not None
        seconds, cost = options.get("max_seconds"), options.get("max_cost")
        return Limits(turns, options.get("max_tokens"), seconds, cost, self.price)
