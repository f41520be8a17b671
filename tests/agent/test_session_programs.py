"""Random programs over a session: whatever is done in whatever order, and cancelled wherever, its log is a
conversation, no call is lost, and what was said stays where it was, to the token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import m3agent as m3
from m3agent.chat import ReplyParser, Tokenizer
from m3agent.runtime import Sampling
from tests.agent.double import Fuse, ScriptedRuntime, block, call, ids_of, read_log
from tests.agent.going_on import agent, cancelled_at

pytestmark = pytest.mark.anyio
SUMMARY = "So far: nothing. "


class Talker(ScriptedRuntime):
    """Answers "ok" when its script is over, and always when it is asked for a summary."""

    def reply(self, log: list[int], sampling: Sampling) -> list[int]:
        asked = "Write down, for yourself" in self.tokenizer.decode(log[-400:])
        if asked or not self.replies:
            return ids_of(f"{SUMMARY if asked else 'ok'}[e~[", self.tokenizer)
        return super().reply(log, sampling)


@m3.tool
async def write(letters: int, context: m3.Context) -> str:
    await context.session._history.runtime.fuse.point()
    return "y" * letters


@m3.tool(needs_approval=True)
def erase(name: str) -> str:
    return f"{name} is gone"


LATE = {name: m3.tool(lambda: "late", name=name) for name in ("late", "later")}
WRITES = block(call("write", letters="700"), call("write", letters="3"))
ASKS = block(call("erase", name="a"), call("write", letters="400"), call("erase", name="b"))


@dataclass
class Program:
    runtime: Talker
    rule: m3.Compaction | None
    session: m3.Session = field(init=False)
    results: dict[str, str] = field(default_factory=dict[str, str])  # by call, whole, of all calls that ever had one
    made: set[str] = field(default_factory=set[str])  # all calls that there ever were

    def __post_init__(self) -> None:
        self.session = agent(self.runtime, write, erase, compaction=self.rule).session()

    async def step(self, kind: str, number: int, point: int | None) -> None:
        """One step, cancelled at waiting point `point`."""
        fuse, before = self.runtime.fuse, self.session.tokens
        fuse.at, fuse.count = point, 0
        seen: list[m3.Event] = []
        await cancelled_at(self.runtime, fuse, lambda: self.do(kind, number, seen.append))
        fuse.at = None
        after, compacted = self.session.tokens, any(isinstance(event, m3.Compacted) for event in seen)
        if kind == "rewind":
            assert before[: len(after)] == after
        elif kind not in ("compact", "json") and not compacted and self.rule is None:
            assert after[: len(before)] == before
        self.check()

    def do(self, kind: str, number: int, see: Callable[[m3.Event], None]) -> Awaitable[Any]:
        session, said = self.session, {"on_event": see}
        self.runtime.replies = {"call": [WRITES], "ask": [ASKS], "cut": ["a longer answer"]}.get(kind, [])
        match kind:
            case "approve" | "deny" if session.pending:
                some = session.pending[number % 2 :]
                return session.run(approve={each.id: kind == "approve" for each in some}, **said)
            case "go on" if session.pending or (session.messages and session.messages[-1].role == "tool"):
                return session.run(**said)
            case "cut":
                return session.run("Be short.", max_tokens=3, **said)
            case "call":
                return session.run("Call.", max_turns=1 + number % 2, **said)
            case "compact":
                rule = m3.Compaction(keep_turns=number % 3, summarise=number > 2)
                return session.compact(rule)
            case _:
                return self.at_once(kind, number) or session.run("Well?", **said)

    def at_once(self, kind: str, number: int) -> Awaitable[Any] | None:
        """Steps that wait for nothing."""
        session, tool = self.session, LATE[("late", "later")[number % 2]]
        there = tool.name in {each.name for each in session.tools}
        if kind == "add" and not there:
            session.add_tool(tool)
        elif kind == "remove" and there:
            session.remove_tool(tool.name)
        elif kind == "fork":
            self.session = session.fork()
        elif kind == "json":
            messages = m3.load_messages(m3.dump_messages(session.messages))
            assert messages == session.messages
            # A tool that the messages say is gone was added again, and that not told yet.
            self.session = agent(self.runtime, *session.tools, compaction=self.rule).session(messages)
            assert self.session.pending == session.pending
        elif kind == "rewind":
            session.rewind(to=number * len(session.messages) // 6)
            left = {each.id for message in session.messages for each in message.calls}
            left |= {id_ for message in session.messages for part in message.parts
                     if isinstance(part, m3.Summary) for id_ in part.results}  # fmt: skip
            self.made &= left
            self.results = {id_: text for id_, text in self.results.items() if id_ in left and self.answered(id_)}
        else:
            return None
        return anyio.lowlevel.checkpoint()

    def answered(self, call_id: str) -> bool:
        return call_id not in {each.id for each in self.session.pending}

    def check(self) -> None:
        session = self.session
        messages, pending = session.messages, {each.id for each in session.pending}
        for before, after in zip([None, *messages], [*messages, None], strict=True):
            if before is not None and before.calls:
                results = after.results if after is not None else []
                answered = [each.id for each in before.calls if after is not messages[-1] or each.id not in pending]
                assert [result.call_id for result in results] == (answered if after is not None else [])
            assert before is None or before.calls or after is None or after.role != "tool"
        self.made |= {each.id for message in messages for each in message.calls}
        for id_ in self.made - pending:
            text = session.full_result(id_)
            assert self.results.setdefault(id_, text) == text
        if session.tokens:
            check_blocks(self.runtime, session)


def check_blocks(runtime: Talker, session: m3.Session) -> None:
    """The log, read from its control tokens alone, says what the messages say, without results that wait."""
    blocks, messages = read_log(runtime, session.tokens)[2:], session.messages
    assert len(blocks) in (len(messages), len(messages) - (messages[-1:] != [] and messages[-1].role == "tool"))
    definitions = [write.definition, erase.definition, *(tool.definition for tool in LATE.values())]
    for found, message in zip(blocks, messages, strict=False):
        assert found.role == {"assistant": "ai"}.get(message.role, message.role)
        if message.role == "tool":
            bodies = "\n".join(f"<response>{result.text}</response>" for result in message.results)
            assert found.body == bodies
        elif message.role == "user":
            assert found.body == "".join(getattr(part, "text", "") for part in message.parts)
        else:
            parser = ReplyParser(definitions, "disabled")
            events: list[Any] = [*parser.feed(found.body.removeprefix("</mm:think>")), *parser.finish()]
            calls = [event for event in events if type(event).__name__ in ("CallFinished", "CallDamaged")]
            # A call that was damaged before its name has another one in a log that was rendered from messages.
            names = [each.name or "unreadable" for each in message.calls]
            assert [event.name or "unreadable" for event in calls] == names
            assert "".join(event.text for event in events if type(event).__name__ == "TextDelta") == message.text


KINDS = ("run", "call", "ask", "approve", "deny", "go on", "cut", "compact", "fork", "json", "add", "remove", "rewind")
STEP = st.tuples(
    st.sampled_from(KINDS), st.integers(0, 5), st.one_of(st.none(), st.none(), st.integers(1, 60), st.integers(1, 400))
)
RULES = st.one_of(st.none(), st.builds(m3.Compaction, at=st.just(0.3), keep_turns=st.integers(0, 2)))


@given(steps=st.lists(STEP, max_size=14), rule=RULES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_program(
    tokenizer: Tokenizer,
    anyio_backend: str,
    fused_threads: Callable[[Fuse], None],
    steps: list[tuple[str, int, int | None]],
    rule: m3.Compaction | None,
) -> None:
    async def main() -> None:
        runtime = Talker(tokenizer, context_length=12_000 if rule is not None else 1_000_000)
        fused_threads(runtime.fuse)
        program = Program(runtime, rule)
        for step in steps:
            await program.step(*step)
        await program.step("run", 0, None)
        assert program.session.messages[-1].text == "ok"

    anyio.run(main, backend=anyio_backend)
