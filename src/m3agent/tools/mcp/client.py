"""`mcp(...)`: the tools of an MCP server as tools of ours."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from pydantic import ValidationError

from m3agent.errors import MissingDependency, ToolDefinitionError, ToolError, ToolsetError
from m3agent.mailbox import Mailbox
from m3agent.tools.context import Context
from m3agent.tools.define import Tool
from m3agent.tools.mcp.connection import Connection, Target, outcome, wait
from m3agent.tools.mcp.listing import Wanted, choose, list_tools
from m3agent.tools.results import ResultPart

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as ListedTool

OPENING = 60.0  # seconds until a server has to be there; `uvx` and `npx` may have to install it first
CLOSING = 15.0  # seconds until a server that does not end is left to itself


def mcp(
    command: str | None = None,
    *args: str,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    prefix: str = "",
    only: Collection[str] | None = None,
    timeout: float | None = 120.0,
    needs_approval: bool | Collection[str] = False,
) -> McpServer:
    """The tools of an MCP server: `async with mcp("uvx", "some-server") as server: Agent(…, tools=[*server])`.

    Args:
        command: the program to start, with its `args`; it speaks MCP over stdin and stdout. Its standard error goes to
            the logger "m3agent.tools.mcp", its last lines into error messages.
        url: instead of a command, the address of a server that speaks streamable HTTP.
        env: variables added to the few (PATH, HOME, …) that the program gets of this process's.
        headers: sent with every HTTP request, such as an authorization.
        prefix: put before every tool's name, so that two servers' tools do not clash.
        only: the server's own names of the tools to take; None takes all.
        timeout: seconds that a call may take; None for no limit.
        needs_approval: the server's own names of the tools that wait for an approval; True for all.

    Raises MissingDependency without the extra `m3agent[mcp]`, ValueError for neither or both of command and url.
    Opening raises ToolsetError.
    """
    if (command is None) == (url is None):
        raise ValueError('give a command, mcp("uvx", "some-server"), or an address, mcp(url="http://…")')
    if command is not None and "://" in command:
        raise ValueError(f"{command!r} is an address: mcp(url={command!r})")
    for option, names in (("only", only), ("needs_approval", needs_approval)):
        if isinstance(names, str):
            raise ValueError(f"{option}= is a list of names: [{names!r}]")
    if find_spec("mcp") is None:
        raise MissingDependency("mcp", "mcp", "using an MCP server")
    program = () if command is None else (command, *args)
    asking = needs_approval if isinstance(needs_approval, bool) else frozenset(needs_approval)
    wanted = Wanted(prefix, None if only is None else frozenset(only), asking)
    return McpServer(Target(program, env, cwd, url, headers), wanted, timeout)


class McpServer:
    """An MCP server and, once it is open, its tools, sorted by name.

    A context manager, asynchronous (any event loop, any task) and plain (for scripts). When the server has died, calls
    fail and say so; `refresh` opens it again.
    """

    def __init__(self, target: Target, wanted: Wanted, timeout: float | None) -> None:
        self._target = target
        self._name = f"MCP server {target.name!r}"
        self._wanted = wanted
        self._timeout = timeout
        self._connection: Connection | None = None
        self._tools: dict[str, Tool[..., Any]] = {}
        self.skipped: dict[str, str] = {}
        """Tools of the server that cannot be used, and why; by the server's names."""
        self.instructions: str | None = None
        """What the server says about its use; for the agent's own instructions, if you trust it."""

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        if self._connection is None:
            raise ToolsetError(f"{self._name} is not open: async with m3agent.tools.mcp(…) as server")
        return iter(list(self._tools.values()))

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        return f"McpServer({self._target.name!r}, {len(self._tools)} tools)"

    async def __aenter__(self) -> McpServer:
        await self._open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __enter__(self) -> McpServer:
        connection = self._begin()
        try:
            connection.opened.result()
            self._take(connection, connection.submit(list_tools).future.result())
        except BaseException as error:
            self._end(connection)
            self._raise(connection, error)
        return self

    def __exit__(self, *error: object) -> None:
        if self._connection is not None:
            self._end(self._connection)

    async def close(self) -> None:
        """End the connection and the program. Can be called twice, and from any task."""
        if self._connection is not None:
            await _closed(self._connection)

    async def refresh(self) -> None:
        """List the tools again, and first open the server again if it is gone. `[*server]` are then the new ones.

        Tools that are still there and look the same stay the same objects. Raises ToolsetError, and
        ToolDefinitionError when a tool that `only` names is no longer there.
        """
        connection = self._connection
        if connection is not None and connection.alive:
            try:
                connection.refused.clear()
                listing = await wait(connection.submit(list_tools).future)
            except Exception:
                pass  # gone without our knowing, or the server forgot the session
            else:
                self._take(connection, listing)
                return
        await self.close()
        await self._open()

    async def _open(self) -> None:
        connection = self._begin()
        try:
            await wait(connection.opened)
            self._take(connection, await wait(connection.submit(list_tools).future))
        except BaseException as error:
            await _closed(connection)
            self._raise(connection, error)

    def _begin(self) -> Connection:
        if self._connection is not None and self._connection.alive:
            raise ToolsetError(f"{self._name} is open already")
        self._connection = Connection(self._target, OPENING)
        self._connection.start()
        return self._connection

    def _end(self, connection: Connection) -> None:
        connection.stop()
        with suppress(TimeoutError):
            connection.closed.result(CLOSING)

    def _raise(self, connection: Connection, error: BaseException) -> None:
        if isinstance(error, ToolsetError | ToolDefinitionError) or not isinstance(error, Exception):
            raise error
        said = "".join(f"\n{line}" for line in connection.said())
        raise ToolsetError(
            f"{self._name} cannot be used: {_short(error)}" + (f"\nIts last output:{said}" if said else "")
        ) from error

    def _take(self, connection: Connection, listing: tuple[list[ListedTool], str | None]) -> None:
        listed, instructions = listing
        tools, skipped = choose(self._name, self._wanted, listed, connection.refused, self._call)
        for name, tool in tools.items():
            old = self._tools.get(name)  # the same object, so that who holds it can tell that nothing changed
            if old is not None and old.definition == tool.definition:
                tools[name] = old
        self._tools, self.skipped, self.instructions = tools, skipped, instructions
        if self._wanted.only is None:
            for name, reason in skipped.items():
                warnings.warn(f"{self._name}: tool {name!r} is left out: {reason}", stacklevel=4)

    async def _call(self, name: str, arguments: dict[str, Any], context: Context) -> ResultPart | list[ResultPart]:
        from m3agent.tools.mcp.content import received

        connection = self._connection
        assert connection is not None  # tools exist after opening only
        box = Mailbox[Any]()

        async def told(progress: float, total: float | None, message: str | None) -> None:
            box.put({"progress": progress, "total": total, "message": message})

        async def work(client: Client) -> CallToolResult:
            return await client.call_tool(name, arguments, progress_callback=told)

        try:
            with anyio.fail_after(self._timeout):
                result = await outcome(connection.submit(work), box, context.progress)
        except TimeoutError:
            raise ToolError(f"{self._name} gave no answer in {self._timeout} s.") from None
        except Exception as error:
            raise await self._explained(connection, error) from error
        parts = await anyio.to_thread.run_sync(received, result)
        if result.is_error:
            raise ToolError(" ".join(part for part in parts if isinstance(part, str)))
        # A list of texts would be shown as JSON; texts that follow each other are one part already.
        return parts[0] if len(parts) == 1 else parts

    async def _explained(self, connection: Connection, error: BaseException) -> ToolError:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if isinstance(error, ToolError):
            return error
        if isinstance(error, CancelledError):  # not by us: the connection broke down around the call
            with anyio.move_on_after(2):  # its reason comes with its end
                await wait(connection.closed)
            connection.lost("it ended")
            return connection.gone()
        if isinstance(error, MCPError):
            if error.code == CONNECTION_CLOSED:
                connection.lost("it ended")
                return connection.gone()
            return ToolError(error.message)
        if isinstance(error, ValidationError | RuntimeError):
            return ToolError(f"{self._name} answered outside the protocol: {_short(error)}")
        return ToolError(_short(error))


async def _closed(connection: Connection) -> None:
    connection.stop()
    with anyio.move_on_after(CLOSING, shield=True):
        await wait(connection.closed)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:800] if str(error) else type(error).__name__
