"""Our tools as an MCP server, against the mcp package's own client: a process over stdio, and HTTP by uvicorn."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import ImageContent, TextContent
from PIL import Image as Pil

import m3agent as m3
from tests.tools.mcp_servers import header_server
from tests.tools.mcp_servers.ours import TOOLS
from tests.tools.processes import eventually

pytestmark = pytest.mark.anyio
OURS = Path(__file__).parent / "mcp_servers" / "ours.py"
HERE = {"PYTHONPATH": str(Path(m3.__file__).parents[1])}  # this m3agent, whichever one is installed


def text(result: Any) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


async def check(client: Client, folder: Path) -> None:
    listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(listed) == [tool.name for tool in TOOLS]
    for tool in TOOLS:
        assert listed[tool.name].input_schema == tool.parameters
        assert listed[tool.name].description == tool.description
    assert text(await client.call_tool("add", {"numbers": [1, 2, 39]})) == "42"
    assert text(await client.call_tool("noise", {})) == "quiet"  # what tools print stays out of the protocol

    failed = await client.call_tool("add", {"numbers": "many"})
    assert failed.is_error
    assert text(failed).startswith("Invalid arguments for add:\nnumbers: ")
    failed = await client.call_tool("refuse", {})
    assert failed.is_error
    assert text(failed) == "not today"
    failed = await client.call_tool("nothing", {})
    assert failed.is_error
    assert "There is no tool 'nothing'. Tools: add, " in text(failed)

    caption, picture = (await client.call_tool("picture", {"colour": "red"})).content
    assert isinstance(caption, TextContent)
    assert isinstance(picture, ImageContent)
    assert picture.mime_type == "image/png"
    shown = Pil.open(io.BytesIO(base64.b64decode(picture.data)))
    assert shown.size == (7, 5)
    assert shown.getpixel((0, 0)) == (255, 0, 0)
    film = (await client.call_tool("film", {})).content
    assert [part.text for part in film if isinstance(part, TextContent)] == [
        "Frame 1 of 2 at 0.00 s:", "Frame 2 of 2 at 0.50 s:",
    ]  # fmt: skip
    assert [type(part) for part in film] == [TextContent, ImageContent] * 2

    told: list[Any] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    assert text(await client.call_tool("steps", {}, progress_callback=progress)) == "done"
    assert told == [(1.0, None, "first"), (0.5, None, None), (3.0, None, '{"a": 1}'), (4.0, 5.0, "four")]
    await cancel(client, folder)
    assert text(await client.call_tool("add", {"numbers": [1]})) == "1"


async def cancel(client: Client, folder: Path) -> None:
    for name in ("wait", "wait_in_thread"):
        inside = folder / name
        inside.mkdir()
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, name, {"folder": str(inside)})
            await eventually((inside / "began").exists)
            group.cancel_scope.cancel()
        await eventually((inside / "ended").exists)


@pytest.mark.parametrize("mode", ["auto", "legacy"])  # today's protocol, and the one with a handshake
async def test_over_stdio(mode: str, tmp_path: Path) -> None:
    program = StdioServerParameters(command=sys.executable, args=[str(OURS)], env=HERE)
    async with Client(program, mode=mode) as client:
        assert client.server_info is not None
        assert client.server_info.name == "ours"
        assert client.instructions == "Use them."
        await check(client, tmp_path)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_over_http(mode: str, tmp_path: Path, anyio_backend_name: str) -> None:
    async with header_server.serving(TOOLS) as (url, _):
        if anyio_backend_name == "asyncio":
            async with Client(url, mode=mode) as client:
                await check(client, tmp_path)
        else:  # its HTTP client under trio is not ours to test: our own client runs everywhere
            async with m3.tools.mcp(url=url) as server:
                assert len(server) == len(TOOLS)


async def test_only_known_host_names_are_answered() -> None:
    async with header_server.serving() as (url, _):
        port = url.split(":")[2].split("/")[0]
        stream = await anyio.connect_tcp("127.0.0.1", int(port))
        async with stream:
            await stream.send(b"POST /mcp HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n"
                              b"Content-Type: application/json\r\n\r\n{}")  # fmt: skip
            assert (await stream.receive()).startswith(b"HTTP/1.1 421")


def test_the_documented_one_liner_serves() -> None:
    code = "import anyio, m3agent as m3; anyio.run(m3.tools.serve_mcp, m3.tools.workspace('.'))"

    async def names() -> list[str]:
        async with Client(StdioServerParameters(command=sys.executable, args=["-c", code], env=HERE)) as client:
            return [tool.name for tool in (await client.list_tools()).tools]

    assert asyncio.run(names()) == [tool.name for tool in m3.tools.workspace(".")]


def test_what_cannot_be_served() -> None:
    @m3.tool(name="add")
    def other() -> str:
        return ""

    with pytest.raises(m3.ToolDefinitionError, match="two tools are named 'add'"):
        m3.tools.mcp_app([TOOLS[0], other])

    def nothing(arguments: dict[str, Any]) -> None: ...

    delete = m3.Tool.from_schema("delete", "", {"type": "object"}, nothing, needs_approval=True)
    with pytest.raises(m3.ToolDefinitionError, match="'delete' needs approval, and a server has nobody to ask"):
        m3.tools.mcp_app([delete])
