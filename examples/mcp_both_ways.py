"""Serve a toolset by MCP, and let the embedded model use it: this file is the server and the client.

python examples/mcp_both_ways.py
"""

import sys
from pathlib import Path

import anyio

import m3agent as m3

SCENE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 224 224">
<rect width="224" height="224" fill="white"/>
<circle cx="80" cy="100" r="40" fill="red"/>
</svg>"""


@m3.tool(description="Render SVG code and look at the picture.")
def render(code: str) -> m3.Image:
    return m3.loops.SvgRenderer((224, 224)).render(code)


async def serve() -> None:
    await m3.tools.serve_mcp([render, *m3.tools.media(Path(__file__).parent)], name="pictures")


async def use() -> None:
    target = m3.loops.SvgRenderer((224, 224)).render(SCENE)
    async with (
        m3.Runtime.open() as runtime,
        m3.tools.mcp(sys.executable, __file__, "serve", only=["render"]) as server,
    ):
        print("tools:", ", ".join(tool.name for tool in server))
        reply = await m3.Agent(runtime, tools=[*server]).run("Draw this picture.", target)
    for message in reply.messages:
        for call in message.calls:
            print("call:", call.name, call.arguments.get("code"))
        for result in message.results:
            print("result:", "error" if result.error else "", *result.parts)
    print("reply:", reply.text)


if __name__ == "__main__":
    anyio.run(serve if sys.argv[1:] == ["serve"] else use)
