"""A server's list of tools → tools of ours: those that were asked for, in a fixed order; why others are left out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from m3agent.errors import ToolDefinitionError
from m3agent.tools.context import Context
from m3agent.tools.define import Tool
from m3agent.tools.results import ResultPart

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as ListedTool

LISTING = 30.0  # seconds for the whole list
_MAX_PAGES = 100

Calling = Callable[[str, dict[str, Any], Context], Awaitable[ResultPart | list[ResultPart]]]


@dataclass(frozen=True)
class Wanted:
    """Which tools to take, by the server's names, and how. `only` None takes all."""

    prefix: str
    only: frozenset[str] | None
    asking: frozenset[str] | bool  # need approval

    @property
    def named(self) -> list[str]:
        """The tools that have to be there."""
        return sorted({*(self.only or ()), *(() if isinstance(self.asking, bool) else self.asking)})


async def list_tools(client: Client) -> tuple[list[ListedTool], str | None]:
    """All tools, and the server's instructions. Raises TimeoutError."""
    tools: list[ListedTool] = []
    cursor = None
    with anyio.fail_after(LISTING):
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
    return tools, client.instructions


def choose(
    server: str, wanted: Wanted, listed: Iterable[ListedTool], refused: Mapping[str, str], call: Calling
) -> tuple[dict[str, Tool[..., Any]], dict[str, str]]:
    """(tools by our names, sorted; reasons by the server's names). `refused` are those that no listing may hold.

    Raises ToolDefinitionError for a tool that was asked for by name and is not there or malformed.
    """
    tools: dict[str, Tool[..., Any]] = {}
    skipped = dict(refused)
    found: set[str] = set()
    for described in sorted(listed, key=lambda tool: tool.name):  # the order is part of the prompt
        found.add(described.name)
        if wanted.only is not None and described.name not in wanted.only:
            continue
        if wanted.prefix + described.name in tools:
            skipped[described.name] = "the server lists this name twice; the first one is used"
            continue
        try:
            made = _tool(described, wanted, call)
        except ToolDefinitionError as error:
            skipped[described.name] = str(error)
        else:
            tools[made.name] = made
    for name in wanted.named:
        if name in skipped and wanted.prefix + name not in tools:
            raise ToolDefinitionError(f"{server}: tool {name!r} cannot be used: {skipped[name]}")
        if name not in found:
            raise ToolDefinitionError(f"{server} has no tool {name!r}. It has: {', '.join(sorted(found)) or 'none'}")
    return tools, skipped


def _tool(described: ListedTool, wanted: Wanted, call: Calling) -> Tool[..., Any]:
    name = described.name

    async def function(arguments: dict[str, Any], context: Context) -> ResultPart | list[ResultPart]:
        return await call(name, arguments, context)

    return Tool.from_schema(
        wanted.prefix + name,
        described.description or described.title or "",
        described.input_schema,
        function,
        needs_approval=wanted.asking if isinstance(wanted.asking, bool) else name in wanted.asking,
    )
