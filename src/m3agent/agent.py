"""`Agent`: a model, instructions and tools; from it come sessions and one-shot runs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from collections.abc import Sequence as Items
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import anyio

from m3agent.approval import Approve
from m3agent.chat.messages import THINKING_MODES, Thinking
from m3agent.compaction import Compaction
from m3agent.content import Content, Message
from m3agent.errors import ConversationError, RuntimeClosed, SessionFileError
from m3agent.events import Reply
from m3agent.history import History
from m3agent.hooks import Hooks
from m3agent.limits import Price
from m3agent.options import RunOptions, Setup
from m3agent.session import Session, named_tools, run_sync
from m3agent.session_file import read
from m3agent.subagent import agent_tool
from m3agent.tools import Tool

if TYPE_CHECKING:
    from m3agent.backend import Backend
    from m3agent.runtime import Sampling

MAX_TURNS = 50

T = TypeVar("T")


class Agent:
    """What sessions have in common. An agent holds no conversation and no memory of its own.

    Args:
        runtime: an open runtime. One that is still to be opened (`m3agent.Runtime.open()`) is opened by the first
            `run` or `run_sync` and stays open with the agent.
        instructions: the developer's text at the front of every session.
        tools: made with `@m3agent.tool`; their order is part of the prompt.
        thinking: "adaptive", "enabled" or "disabled"; None takes the checkpoint's own default, or else "adaptive".
        sampling: None takes the checkpoint's own.
        max_turns: the limit on model turns of one run.
        approve: asked about calls of tools that need approval: `approve(call)` or `approve(call, context)`, plain (run
            in a thread) or async, returns True, False, or a reason that the model is told. Without it such calls end
            the run, and `session.run(approve={call_id: True})` goes on.
        hooks: functions called around turns and calls.
        price: what tokens cost; then `reply.cost` is counted, and runs can have a `max_cost`.
        guided: hold calls to their tools' schemas while they are written. Without it a call that does not fit is
            answered with an error, and `output=` is only asked for.
        compaction: make room when the context runs short, see `Compaction`; None lets the session run full, and
            `session.compact()` is there.
        trace_content: let OpenTelemetry spans hold what was said, called and answered, and not just how much.

    Raises ToolDefinitionError for two tools of one name, ValueError for an unknown thinking mode.
    """

    def __init__(
        self,
        runtime: Backend | Awaitable[Backend],
        *,
        instructions: str | None = None,
        tools: Items[Tool[..., Any]] = (),
        thinking: Thinking | None = None,
        sampling: Sampling | None = None,
        max_turns: int = MAX_TURNS,
        approve: Approve | None = None,
        hooks: Hooks | None = None,
        price: Price | None = None,
        guided: bool = True,
        compaction: Compaction | None = None,
        trace_content: bool = False,
    ) -> None:
        if thinking is not None and thinking not in THINKING_MODES:
            raise ValueError(f"thinking must be one of {', '.join(THINKING_MODES)}, not {thinking!r}")
        if runtime is None or isinstance(runtime, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise TypeError(f"an agent needs a runtime, not {runtime!r}: Agent(m3agent.Runtime.open({runtime!r}))")
        if approve is not None and not callable(approve):
            raise TypeError(f"an agent's approve is a function, not {approve!r}; decisions about calls go to run()")
        self._runtime = runtime
        self._opening = anyio.Lock()
        self._tools = named_tools(tools)
        self._sampling = sampling
        self._approve: Approve | None = approve
        self._hooks = hooks or Hooks()
        self._price = price
        self._guided = guided
        self._compaction = compaction
        self._trace_content = trace_content
        self.instructions = instructions
        self.thinking: Thinking | None = thinking
        self.max_turns = max_turns

    @property
    def tools(self) -> list[Tool[..., Any]]:
        return list(self._tools)

    @property
    def runtime(self) -> Backend:
        """The open runtime. Raises RuntimeClosed when it has not been opened yet."""
        if inspect.isawaitable(self._runtime):
            raise RuntimeClosed("the runtime is not open yet: async with m3agent.Runtime.open() as runtime: …")
        return self._runtime

    def session(self, messages: Items[Message] = (), *, name: str = "") -> Session:
        """A new conversation, or one that goes on from `messages` (of `session.messages` or `load_messages`).

        name: what `runtime.sequences()` and `m3agent top` call it.
        Raises RuntimeClosed, ConversationError for messages in which results do not follow their calls.
        """
        runtime = self.runtime
        thinking = self.thinking or runtime.defaults.thinking_mode or "adaptive"
        history = History(runtime, self.instructions, thinking, self._tools, messages)
        history.name = name
        sampling = self._sampling or runtime.defaults.sampling()
        defaults = RunOptions(max_turns=self.max_turns, sampling=sampling, approve=self._approve)
        setup = Setup(
            defaults, self._hooks, self._price, self._guided, self._compaction, trace_content=self._trace_content
        )
        return Session(history, setup)

    async def restore(self, path: str | PathLike[str], *, name: str = "") -> Session:
        """The session that `session.save(path)` wrote, to go on with.

        With the same weights, instructions and thinking it has the very tokens that it had, and the pages that the file
        or the cache has; otherwise, its messages. Tools that came or went meanwhile are told to the model.
        Raises SessionFileError for a file that is missing or damaged, RuntimeClosed, MediaError.
        """
        file = Path(path)
        saved = await read(file)
        try:
            session = self.session(saved.messages, name=name)
        except ConversationError as error:
            raise SessionFileError(f"{file}: its messages are no conversation ({error})") from error
        await session.take_up(saved, file)
        return session

    def as_tool(
        self, *, name: str = "agent", description: str = "", fork: bool = False, output: Any = None
    ) -> Tool[..., Any]:
        """This agent as a tool of another one: `Agent(runtime, tools=[researcher.as_tool(name="research")])`.

        Each call runs the task that the model writes in a session of its own, whose events are the call's progress and
        whose usage counts for the run; the final text, or the JSON of `output`, is the result. A run that a limit ends
        is an error for the caller. fork: run on a fork of the calling session instead, with its instructions, tools and
        whole past, which it shares without computing anything twice. Agents may be 4 deep inside each other.
        """
        said = description or "Hand a task to another agent, which works on it alone and answers with the outcome."
        return agent_tool(self, name, said, fork, output)

    @overload
    async def run(self, *parts: Content, output: None = None, **options: Unpack[RunOptions]) -> Reply: ...
    @overload
    async def run(self, *parts: Content, output: type[T], **options: Unpack[RunOptions]) -> Reply[T]: ...
    @overload
    async def run(self, *parts: Content, output: Any, **options: Unpack[RunOptions]) -> Reply[Any]: ...
    async def run(self, *parts: Content, output: Any = None, **options: Unpack[RunOptions]) -> Reply[Any]:
        """One run in a session of its own, as `Session.run`."""
        if inspect.isawaitable(self._runtime):
            async with self._opening:  # runs that begin together share one
                if inspect.isawaitable(self._runtime):
                    self._runtime = await self._runtime
        async with self.session() as session:
            return await session.run(*parts, output=output, **options)

    @overload
    def run_sync(self, *parts: Content, output: None = None, **options: Unpack[RunOptions]) -> Reply: ...
    @overload
    def run_sync(self, *parts: Content, output: type[T], **options: Unpack[RunOptions]) -> Reply[T]: ...
    @overload
    def run_sync(self, *parts: Content, output: Any, **options: Unpack[RunOptions]) -> Reply[Any]: ...
    def run_sync(self, *parts: Content, output: Any = None, **options: Unpack[RunOptions]) -> Reply[Any]:
        """`run` for scripts, without an event loop. Raises RuntimeError inside one."""
        return run_sync(lambda: self.run(*parts, output=output, **options))
