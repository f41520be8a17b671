"""Tools: Python functions that the model may call.

`signature` and `docs` read a function, `schema` makes its JSON schema, `define` is `@tool`, `results` turns what it
returned into text and pictures, and `execute` runs one call so that whatever happens becomes a short answer.
`workspace` is a set of ready tools: the files of one folder. `shell` and `python` are sets that start programs, with
`process` and `output` below them. `media` looks at pictures and films, `browser` acts on pages, `render_tools` draws
code, `mcp` speaks the Model Context Protocol in both directions, and `plugins` finds the toolsets of other packages.
"""

from m3agent.tools.browser import BrowserTools, browser
from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool
from m3agent.tools.mcp import McpServer, mcp, mcp_app, serve_mcp
from m3agent.tools.media import media
from m3agent.tools.plugins import InstalledToolset, toolset, toolsets
from m3agent.tools.python_tool import python
from m3agent.tools.render_tools import render
from m3agent.tools.results_tool import results
from m3agent.tools.sandbox import Sandbox
from m3agent.tools.shell_tool import shell
from m3agent.tools.workspace import workspace

__all__ = [
    "BrowserTools",
    "Context",
    "InstalledToolset",
    "McpServer",
    "Sandbox",
    "Tool",
    "browser",
    "mcp",
    "mcp_app",
    "media",
    "python",
    "render",
    "results",
    "serve_mcp",
    "shell",
    "tool",
    "toolset",
    "toolsets",
    "workspace",
]
