"""Opening a connection to an MCP server: a program of our own over its pipes, or streamable HTTP."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, TextIO, cast

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import SessionMessage
from mcp.types import Implementation, JSONRPCResponse
from mcp.types import Tool as ListedTool
from pydantic import ValidationError

from m3agent.tools.mcp.connection import Target

_MAX_LINE = 4000  # bytes

_log = logging.getLogger("m3agent.tools.mcp")


@asynccontextmanager
async def open_client(
    target: Target, errors: deque[str], refused: dict[str, str], started: Callable[[], None]
) -> AsyncGenerator[Client]:
    """A client after its handshake.

    The last lines of a program's standard error, and HTTP answers that are errors, are kept in `errors`. Tools that a
    listing describes in a way that the protocol does not allow are taken out of it, into `refused` with the reason.
    `started` is called when there is a program that can be ended.
    """
    async with AsyncExitStack() as stack:
        if target.url is not None:
            http = await stack.enter_async_context(create_mcp_http_client(headers=dict(target.headers or {})))
            http.timeout = (
                30.0,
                None,
                30.0,
                30.0,
            )  # connect, read, write, pool; a call has its own limit

            async def note(response: Any) -> None:
                if response.status_code >= 400:
                    errors.append(f"HTTP {response.status_code} {response.reason_phrase}".rstrip())

            http.event_hooks = {"response": [note]}
            streams = streamable_http_client(target.url, http_client=http)
            started()
        else:
            streams = _program(target, errors, started)
        client = Client(
            _sifted(streams, refused),
            client_info=Implementation(name="m3agent", version=version("m3agent")),
            cache=None,
        )
        yield await stack.enter_async_context(client)


@asynccontextmanager
async def _program(target: Target, errors: deque[str], started: Callable[[], None]) -> AsyncGenerator[Any]:
    command, *args = target.command
    parameters = StdioServerParameters(
        command=command,
        args=args,
        env=dict(target.env) if target.env else None,
        cwd=os.fspath(target.cwd) if target.cwd is not None else None,
        encoding_error_handler="replace",  # a server that prints bytes must not end the connection
    )
    read, write = os.pipe()
    threading.Thread(target=_keep_lines, args=(read, errors), name="m3agent-mcp-stderr", daemon=True).start()
    with os.fdopen(write, "w") as errlog:
        async with stdio_client(parameters, errlog=cast(TextIO, errlog)) as streams:
            errlog.close()  # the server has its own; ours would keep the pipe open
            started()
            yield streams


def _keep_lines(descriptor: int, errors: deque[str]) -> None:
    """Read a server's standard error to its end: it goes to the log, never to a terminal, and never fills a pipe."""
    with os.fdopen(descriptor, "rb") as lines, suppress(OSError, ValueError):
        while line := lines.readline(_MAX_LINE):
            text = line.decode(errors="replace").rstrip()
            errors.append(text)
            _log.info("%s", text)


@asynccontextmanager
async def _sifted(streams: Any, refused: dict[str, str]) -> AsyncGenerator[Any]:
    async with streams as (read, write):
        yield _SiftedStream(read, refused), write


class _SiftedStream:
    """A transport's read stream. One tool with a malformed description would otherwise fail the whole listing."""

    def __init__(self, stream: Any, refused: dict[str, str]) -> None:
        self._stream = stream
        self._refused = refused

    async def receive(self) -> Any:
        return self._sift(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _SiftedStream:
        return self

    async def __anext__(self) -> Any:
        return self._sift(await self._stream.__anext__())

    async def __aenter__(self) -> _SiftedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stream.__aexit__(*error)

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    def _sift(self, item: Any) -> Any:
        message = item.message if isinstance(item, SessionMessage) else None
        if isinstance(message, JSONRPCResponse) and isinstance(message.result.get("tools"), list):
            message.result["tools"] = [tool for tool in message.result["tools"] if self._sound(tool)]
        return item

    def _sound(self, tool: Any) -> bool:
        try:
            listed = ListedTool.model_validate(tool, by_name=False)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            entry = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
            name = entry.get("name")
            self._refused[name if isinstance(name, str) else "(without a name)"] = f"{place}: {first['msg']}"
            return False
        if listed.input_schema.get("type") != "object":
            self._refused[listed.name] = "inputSchema: its type has to be 'object'"
            return False
        return True
