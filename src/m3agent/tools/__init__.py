"""Tools: Python functions that the model may call.

`signature` and `docs` read a function, `schema` makes its JSON schema, `define` is `@tool`, `results` turns what it
returned into text and pictures, and `execute` runs one call so that whatever happens becomes a short answer.
`workspace` is a set of ready tools: the files of one folder.
"""

from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool
from m3agent.tools.workspace import workspace

__all__ = ["Context", "Tool", "tool", "workspace"]
