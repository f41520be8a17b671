"""Tools: Python functions that the model may call.

`signature` and `docs` read a function, `schema` makes its JSON schema, `define` is `@tool`, `results` turns what it
returned into text and pictures, and `execute` runs one call so that whatever happens becomes a short answer.
"""

from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool

__all__ = ["Context", "Tool", "tool"]
