"""`workspace`: tools with which a model reads, searches and changes the files beneath one folder, and no others.

`beneath` (with `kernel`) finds files without ever leaving the root, `encoding`, `lines` and `save` change them without
touching a byte too many, `walk`, `globs` and `search` look for them, `history` knows what was changed.
"""

from m3agent.tools.workspace.toolset import workspace

__all__ = ["workspace"]
