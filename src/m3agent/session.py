"""`Session`: one conversation with its own KV cache: run it, stream it, fork it, close it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import anyio

from m3agent.compaction import Compaction
from m3agent.content import Content, Message, ToolCall, ToolResult
from m3agent.errors import SessionBusy, ToolDefinitionError
from m3agent.events import Compacted, Reply
from m3agent.history import History
from m3agent.make_room import make_room
from m3agent.options import Keep, RunOptions, Setup
from m3agent.output import output_of
from m3agent.run import Run, Shared
from m3agent.session_file import Saved, take_up, write
from m3agent.stream import RunStream
from m3agent.tools import Tool
from m3agent.transcript import full_result, said_by_user

if TYPE_CHECKING:
    from m3agent.runtime import Usage

T = TypeVar("T")


class Session:
    """Made by `Agent.session()`. One run at a time; sessions of one runtime run side by side.

    The session holds tokens: what the model produced stays as it was produced, every prompt is a continuation of the
    last one, and nothing is computed twice (`reply.usage.recomputed_tokens` is 0). Only `compact` leaves things out,
    and `rewind` takes back.
    """

    def __init__(self, history: History, setup: Setup) -> None:
        self._history = history
        self._setup = setup
        self._shared = Shared()

    @property
    def messages(self) -> list[Message]:
        """The conversation as plain data, with all that `agent.session(messages)` needs to go on with it: the tools at
        the front of the prompt and those that came or went, results whole, calls that wait. `m3agent.dump_messages`
        writes it as JSON.
        """
        return list(self._history.messages)

    @property
    def pending(self) -> tuple[ToolCall, ...]:
        """The calls that wait for approval, in call order; a message of the user answers them "not approved"."""
        return () if self._shared.held else self._history.pending

    @property
    def tokens(self) -> list[int]:
        """The token log. The log of a turn is a prefix of the next one's, unless the session was compacted or
        rewound between.
        """
        return self._history.tokens

    @property
    def tools(self) -> list[Tool[..., Any]]:
        return list(self._history.tools.by_name.values())

    @property
    def usage(self) -> Usage:
        """What all runs and compactions of this session have used since it was made, or forked."""
        return self._shared.usage

    @overload
    async def run(self, *parts: Content, output: None = None, **options: Unpack[RunOptions]) -> Reply: ...
    @overload
    async def run(self, *parts: Content, output: type[T], **options: Unpack[RunOptions]) -> Reply[T]: ...
    @overload
    async def run(self, *parts: Content, output: Any, **options: Unpack[RunOptions]) -> Reply[Any]: ...
    async def run(self, *parts: Content, output: Any = None, **options: Unpack[RunOptions]) -> Reply[Any]:
        """Say something and let the model answer, calls of tools included, until a turn without calls.

        parts: texts, pictures, films, in their order; none lets the model go on from results that it has not seen.
        output: the type of the answer, anything that pydantic has a schema for; the model is told it, and its answer
        cannot be anything else. `reply.output` is the validated value. Tools may be called before.
        options: see `RunOptions`.
        Raises MediaError for a picture that cannot be used (nothing was added then), ConversationError,
        ContextOverflow, ValueError for a stop token outside the vocabulary (the same holds), SessionBusy,
        RuntimeClosed, NumericalError, GuideError, ToolDefinitionError for an output without a schema. When cancelled,
        the session keeps what was generated and can go on.
        """
        async with self.stream(*parts, output=output, **options) as events:
            async for _ in events:
                pass
            return events.reply

    @overload
    def stream(self, *parts: Content, output: None = None, **options: Unpack[RunOptions]) -> RunStream: ...
    @overload
    def stream(self, *parts: Content, output: type[T], **options: Unpack[RunOptions]) -> RunStream[T]: ...
    @overload
    def stream(self, *parts: Content, output: Any, **options: Unpack[RunOptions]) -> RunStream[Any]: ...
    def stream(self, *parts: Content, output: Any = None, **options: Unpack[RunOptions]) -> RunStream[Any]:
        """The same run as events: `async with session.stream(…) as events: async for event in events: …`."""
        told = self._setup.options(options)
        wanted = None if output is None else output_of(output)
        limits = self._setup.limits(told)
        return RunStream(Run(self, self._history, self._shared, self._setup, parts, told, limits, wanted))

    @overload
    def run_sync(self, *parts: Content, output: None = None, **options: Unpack[RunOptions]) -> Reply: ...
    @overload
    def run_sync(self, *parts: Content, output: type[T], **options: Unpack[RunOptions]) -> Reply[T]: ...
    @overload
    def run_sync(self, *parts: Content, output: Any, **options: Unpack[RunOptions]) -> Reply[Any]: ...
    def run_sync(self, *parts: Content, output: Any = None, **options: Unpack[RunOptions]) -> Reply[Any]:
        """`run` for code without an event loop. Raises RuntimeError inside one."""
        return run_sync(lambda: self.run(*parts, output=output, **options))

    def add_tool(self, tool: Tool[..., Any]) -> None:
        """Give the model one more tool. After the first run that is told in the next message: the tools at the front
        of the prompt stay as they are, and nothing is computed again.

        Raises SessionBusy during a run, ToolDefinitionError for a name that is taken.
        """
        self._check_idle("a tool cannot be added during a run")
        self._history.tools.add(tool)

    def remove_tool(self, name: str) -> None:
        """Take a tool away; the model is told in the next message, and a call of it is answered with an error.

        Raises SessionBusy during a run, ToolDefinitionError for a name that no tool has.
        """
        self._check_idle("a tool cannot be removed during a run")
        self._history.tools.remove(name)

    async def compact(self, rule: Compaction | None = None) -> Compacted | None:
        """Make room in the context now: old results become notes, and, if that does not halve the log, old turns of the
        model a summary that it writes. None when there was nothing to leave out. rule: the agent's own by default.

        Raises SessionBusy during a run, RuntimeClosed. Nothing changes when it is cancelled.
        """
        self._check_idle("a session cannot be compacted during a run")
        self._shared.held = True
        try:
            rule = rule or self._setup.compaction or Compaction()
            return await make_room(self._history, rule, self._history.fill / 2, self._shared.spend)
        finally:
            self._shared.held = False

    def rewind(self, turns: int = 1, *, to: int | None = None) -> None:
        """Take back the end of the conversation; the session goes on as if it had not been.

        turns: so many messages of the user go, with all that came of them. to: instead, `session.messages[to:]` go;
        where that leaves calls without results, they are pending, and results at the end wait for `run()`.
        The token log is cut there and keeps its pages, so nothing is computed again. News of tools that go are told
        anew. What tools did (files of a workspace, say) is not undone, and `usage` counts on.

        Raises SessionBusy during a run, ValueError for messages that there are not, RuntimeClosed.
        """
        self._check_idle("a session cannot be rewound during a run")
        messages = self._history.messages
        if to is None:
            said = [place for place, message in enumerate(messages) if said_by_user(message)]
            if not 1 <= turns <= len(said):
                raise ValueError(f"turns is {turns}; the user has said {len(said)} messages")
            to = said[-turns]
        if not 0 <= to <= len(messages):
            raise ValueError(f"to is {to}; there are {len(messages)} messages")
        self._history.rewind(to)

    def full_result(self, call_id: str) -> str:
        """A call's result as text, whole where the model was shown a part. Raises KeyError for an unknown id."""
        return full_result(self._history.messages, call_id)

    def _check_idle(self, problem: str) -> None:
        if self._shared.held:
            raise SessionBusy(problem)

    def fork(self) -> Session:
        """A second session with the same past. It shares every page so far; the two go on independently.

        Raises SessionBusy during a run, and for up to a step of the model after a stream that was dropped without its
        `async with` block, whose last step still runs; RuntimeClosed.
        """
        self._check_idle("a session cannot be forked during a run")
        return Session(self._history.fork(), replace(self._setup, keep=None))

    def fork_inside(self) -> Session:
        """`fork` for a tool of this session, during a call: in the fork all calls of the turn are pending."""
        return Session(self._history.fork(), replace(self._setup, keep=None))

    def answer(self, results: Items[ToolResult]) -> None:
        """Results for pending calls, instead of running them; `run()` goes on from there."""
        self._history.add_results([self._history.measured(result) for result in results])

    async def save(self, path: str | PathLike[str], *, pages: bool = False) -> None:
        """Write the session to one file, from which `agent.restore(path)` goes on, here or elsewhere.

        pages: the KV cache's pages of it, too, so that nothing is computed again; they are large (for m3-nano 7 KiB a
        token, for MiniMax-M3 134).
        Raises SessionBusy during a run, SessionFileError (the file that was there stays), RuntimeClosed.
        """
        self._check_idle("a session cannot be saved during a run")
        self._shared.held = True
        try:
            await write(Path(path), self._history, pages)
        finally:
            self._shared.held = False

    async def take_up(self, saved: Saved, path: Path) -> None:
        """For `Agent.restore`: go on with the tokens of a file whose messages this session was made of."""
        await take_up(self._history, saved, path)

    def keep(self, keep: Keep | None) -> None:
        """For `Sessions`: what is called after every turn."""
        self._setup = replace(self._setup, keep=keep)

    async def close(self) -> None:
        """Give the session's pages back. A run in progress ends with RuntimeClosed. As often as you like, from any
        task.
        """
        self._history.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def named_tools(tools: Items[Tool[..., Any]]) -> list[Tool[..., Any]]:
    """The tools as they are. Raises ToolDefinitionError for two of one name, TypeError for a bare function."""
    names: set[str] = set()
    for tool in tools:
        if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{tool!r} is no tool; decorate the function with @m3agent.tool")
        if tool.name in names:
            raise ToolDefinitionError(f"there are two tools named {tool.name!r}; give one of them another name")
        names.add(tool.name)
    return list(tools)


def run_sync(run: Callable[[], Awaitable[Reply[T]]]) -> Reply[T]:
    """Run to the end in an event loop of its own. Raises RuntimeError where one is running already."""
    try:
        anyio.get_current_task()
    except RuntimeError:
        return anyio.run(run)
    raise RuntimeError("run_sync inside a running event loop (a notebook has one, too): write await ….run(…) instead")
