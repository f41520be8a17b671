"""`Run`: what a run of a session is made of, and what it comes to; `Shared`: what a session's runs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m3agent import tracing
from m3agent.approval import Decision
from m3agent.background import Background
from m3agent.calls import Surroundings
from m3agent.content import Content
from m3agent.errors import NoOutput
from m3agent.events import Reply, Stop
from m3agent.history import History
from m3agent.limits import Limits
from m3agent.options import RunOptions, Setup
from m3agent.output import Output

if TYPE_CHECKING:
    from m3agent.runtime import Usage


class Shared:
    """held: a run holds the session. left: calls of a dropped stream that are still being cancelled. usage: of all runs
    and compactions so far.
    """

    def __init__(self) -> None:
        self.held = False
        self.left: Background | None = None
        self.usage = no_usage()

    def spend(self, usage: Usage) -> None:
        self.usage += usage


@dataclass(frozen=True)
class Run:
    """`session` is for tools and hooks."""

    session: Any
    history: History
    shared: Shared
    setup: Setup
    parts: tuple[Content, ...]
    options: RunOptions
    limits: Limits
    output: Output[Any] | None = None

    def surroundings(self, decisions: Mapping[str, Decision], all_ask: bool, span: tracing.Span) -> Surroundings:
        """Of calls of this run."""
        approve = self.options.get("approve")
        if isinstance(approve, Mapping):  # the decisions of now; about later calls the agent's callback is asked
            approve = self.setup.defaults.get("approve")
        assert not isinstance(approve, Mapping)
        deps, hooks, content = self.options.get("deps"), self.setup.hooks, self.setup.trace_content
        return Surroundings(self.session, deps, hooks, approve, decisions, all_ask, span, content)

    def reply(self, usage: Usage, stop: Stop, value: Any) -> Reply[Any]:
        """value: the typed answer, where there is one."""
        messages = tuple(self.history.messages[self.history.began :])
        said = [message for message in messages if message.role == "assistant"]
        text, thinking = (said[-1].text, said[-1].thinking) if said else ("", "")
        if stop != "end" and self.output is not None:
            value = NoOutput(f"the run ended before an answer: {stop}")
        return Reply(text, thinking, messages, usage, stop, self.limits.cost_of(usage), value)


def no_usage() -> Usage:
    from m3agent.runtime.usage import Usage  # imports torch, so not before a runtime is open

    return Usage()
