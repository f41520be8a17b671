"""A real MCP server, written with the mcp package's own server: over stdio, or over HTTP with a port as argument."""

import base64
import io
import os
import signal
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)
from PIL import Image as Pil

server = MCPServer("everything", instructions="Add things.")
print("this goes to standard error", file=sys.stderr, flush=True)


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Pil.new("RGB", (12, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def echo(agent: str, name: str, context: str) -> str:
    """Say it again."""
    return f"{agent} {name} {context}"


@server.tool()
def surroundings() -> dict[str, str]:
    """Where the server runs."""
    return {"cwd": os.getcwd(), "secret": os.environ.get("SECRET", ""), "given": os.environ.get("GIVEN", "")}


@server.tool()
def picture(colour: str) -> Image:
    """A picture of one colour."""
    return Image(data=png(colour), format="png")


@server.tool()
def mixed() -> CallToolResult:
    """Everything at once."""
    broken = base64.b64encode(b"\x89PNG\r\n\x1a\nnot really").decode()
    return CallToolResult(
        content=[
            TextContent(text="before"),
            TextContent(text="still before"),
            ImageContent(data=base64.b64encode(png("red")).decode(), mime_type="image/png"),
            TextContent(text="after"),
            ImageContent(data=broken, mime_type="image/png"),
            ImageContent(data="%%%", mime_type="image/png"),
            AudioContent(data="UklGRg==", mime_type="audio/wav"),
            EmbeddedResource(resource=TextResourceContents(uri="file:///note", text="a note")),
            EmbeddedResource(
                resource=BlobResourceContents(uri="file:///blue", blob=base64.b64encode(png("blue")).decode())
            ),
        ],
        structured_content={"n": 3},
    )


@server.tool()
def fail() -> str:
    """Does not work."""
    raise ToolError("the disk is full")


@server.tool()
async def count(to: int, context: Context) -> str:
    """Count, and say how far."""
    for number in range(1, to + 1):
        await context.report_progress(number, to, f"at {number}")
    return "counted"


@server.tool()
async def wait(folder: str) -> str:
    """Wait for ever; leaves a note when it begins and when it is cancelled."""
    Path(folder, "began").write_text(str(os.getpid()))
    try:
        await anyio.sleep_forever()
    finally:
        Path(folder, "ended").touch()
    return "never"


@server.tool()
def die() -> str:
    """Kill this server."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
