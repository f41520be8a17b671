"""MCP both ways: the tools of any MCP server as tools here, and our tools served as an MCP server.

`client` is `mcp(...)`: `connection` owns the connection in a thread of its own, `transport` opens it, `listing` makes
the tools. `serve` is `serve_mcp` and `mcp_app`. `content` is results in either direction. `mcp` is imported on use.
"""

from m3agent.tools.mcp.client import McpServer, mcp
from m3agent.tools.mcp.serve import mcp_app, serve_mcp

__all__ = ["McpServer", "mcp", "mcp_app", "serve_mcp"]
