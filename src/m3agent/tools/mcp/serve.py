"""`serve_mcp` and `mcp_app`: our tools as an MCP server, over stdin and stdout or over streamable HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread

from m3agent.errors import MediaError, MissingDependency, ToolDefinitionError, ToolError
from m3agent.mailbox import Mailbox
from m3agent.tools.context import Context
from m3agent.tools.define import Tool
from m3agent.tools.execute import call_tool

if TYPE_CHECKING:
    from mcp.server import Server, ServerRequestContext
    from mcp.types import CallToolRequestParams, CallToolResult, ContentBlock
    from starlette.applications import Starlette

_MAX_MESSAGE = 500  # characters of a progress message


async def serve_mcp(tools: Iterable[Tool[..., Any]], *, name: str = "m3agent", instructions: str | None = None) -> None:
    """Serve `tools` to the MCP client that started this program, over stdin and stdout, until it closes stdin.

    `python -c "import anyio, m3agent as m3; anyio.run(m3.tools.serve_mcp, m3.tools.workspace('.'))"` is a whole server.
    What is printed meanwhile goes to standard error. Pictures are sent as PNG, films as their frames.

    Raises ToolDefinitionError for two tools of one name and for a tool that needs approval, MissingDependency without
    the extra `m3agent[mcp]`.
    """
    server = _server(tools, name, instructions)
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def mcp_app(
    tools: Iterable[Tool[..., Any]],
    *,
    name: str = "m3agent",
    instructions: str | None = None,
    path: str = "/mcp",
    hosts: Sequence[str] = (),
) -> Starlette:
    """An ASGI application that serves `tools` by streamable HTTP: `uvicorn.run(mcp_app(tools), port=8000)`.

    Requests are answered under the names of this machine (localhost, 127.0.0.1) and those in `hosts`, written as
    browsers send them ("tools.example.org", "tools.example.org:8443"), so that no web page can reach the tools by
    another name. There is no login: whoever reaches the port may call the tools. Raises as `serve_mcp`.
    """
    server = _server(tools, name, instructions)
    from mcp.server.transport_security import TransportSecuritySettings

    here = ["127.0.0.1:*", "localhost:*", "[::1]:*", "127.0.0.1", "localhost", "[::1]"]
    allowed = [*here, *hosts]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=allowed,
        allowed_origins=[f"{scheme}://{host}" for host in allowed for scheme in ("http", "https")],
    )
    return server.streamable_http_app(streamable_http_path=path, transport_security=security)


def _server(tools: Iterable[Tool[..., Any]], name: str, instructions: str | None) -> Server[Any]:
    if find_spec("mcp") is None:
        raise MissingDependency("mcp", "mcp", "serving tools by MCP")
    from mcp.server import Server
    from mcp.types import ListToolsResult
    from mcp.types import Tool as ListedTool

    served = _by_name(tools)
    listed = [
        ListedTool(name=tool.name, description=tool.description or None, input_schema=tool.parameters)
        for tool in served.values()
    ]

    async def list_tools(context: ServerRequestContext[Any], params: Any) -> ListToolsResult:
        return ListToolsResult(tools=listed)

    async def call(context: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        return await _call(served, context, params)

    return Server(
        name, version=version("m3agent"), instructions=instructions, on_list_tools=list_tools, on_call_tool=call
    )


def _by_name(tools: Iterable[Tool[..., Any]]) -> dict[str, Tool[..., Any]]:
    served: dict[str, Tool[..., Any]] = {}
    for tool in tools:
        if tool.name in served:
            raise ToolDefinitionError(f"two tools are named {tool.name!r}; serve one of them, or give one another name")
        if tool.needs_approval:
            raise ToolDefinitionError(
                f"tool {tool.name!r} needs approval, and a server has nobody to ask. MCP clients ask their own user: "
                "serve the tool without needs_approval"
            )
        served[tool.name] = tool
    return served


async def _call(
    tools: dict[str, Tool[..., Any]], context: ServerRequestContext[Any], params: CallToolRequestParams
) -> CallToolResult:
    """Run one call. When the client cancels it, this is cancelled, and the tool with it."""
    from mcp.types import CallToolResult, TextContent

    from m3agent.tools.mcp.content import sent

    progress = Mailbox[Any]()
    ours = Context(params.name, str(context.request_id), on_progress=progress.put)
    content: list[ContentBlock] = []
    failed = False
    async with anyio.create_task_group() as group:
        group.start_soon(_report, context, progress)
        try:
            parts = await call_tool(tools, params.name, params.arguments or {}, ours)
            content = await anyio.to_thread.run_sync(sent, parts)
        except (ToolError, MediaError) as error:
            content.append(TextContent(text=str(error)))
            failed = True
        progress.put(_END)
    return CallToolResult(content=content, is_error=failed)


_END = object()


async def _report(context: ServerRequestContext[Any], progress: Mailbox[Any]) -> None:
    """Send on what the tool reports, before its result: numbers as they are, anything else as a message."""
    count = 0
    while (value := await progress.get()) is not _END:
        count += 1
        match value:
            case {"progress": int() | float() as done, **rest}:  # as our own client reports it
                total, message = rest.get("total"), rest.get("message")
            case bool() | str():
                done, total, message = count, None, str(value)
            case int() | float():
                done, total, message = value, None, None
            case _:
                done, total, message = count, None, _as_text(value)
        message = message[:_MAX_MESSAGE] if isinstance(message, str) else None
        await context.session.report_progress(float(done), cast("float | None", total), message)


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)
