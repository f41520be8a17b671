"""The media toolset: look at, cut, enlarge and compare the pictures and films of one folder.

`toolset` is the tools, `film` finds frames by time, `difference` is what two pictures do not share.
"""

from m3agent.tools.media.toolset import media

__all__ = ["media"]
