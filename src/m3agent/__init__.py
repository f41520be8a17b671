"""MiniMax-M3 inside a Python program: agents that see pictures and films, with model and KV cache in the same process.

    async with m3agent.Runtime.open() as runtime:
        reply = await m3agent.Agent(runtime).run("What is this?", m3agent.Image("photo.jpg"))

The public names are looked up on first use: `import m3agent` imports no torch, starts nothing and configures nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m3agent import loops, tools
    from m3agent.agent import Agent
    from m3agent.compaction import Compaction
    from m3agent.content import (
        Message,
        Summary,
        Text,
        Thinking,
        ToolCall,
        ToolChange,
        ToolResult,
        dump_messages,
        load_messages,
    )
    from m3agent.errors import (
        CacheError,
        CheckpointError,
        ConfigError,
        ContextOverflow,
        ConversationError,
        GuideError,
        ImageError,
        M3Error,
        MediaError,
        MissingDependency,
        NoOutput,
        NumericalError,
        Overloaded,
        RenderError,
        RuntimeClosed,
        SessionBusy,
        SessionFileError,
        ToolDefinitionError,
        ToolError,
        ToolsetError,
        VideoError,
    )
    from m3agent.events import (
        ApprovalNeeded,
        CallArguments,
        CallFinished,
        CallStarted,
        Compacted,
        Done,
        Event,
        Reply,
        TextDelta,
        ThinkingDelta,
        ToolFinished,
        ToolProgress,
        ToolResultEvent,
        TurnFinished,
    )
    from m3agent.hooks import Hooks
    from m3agent.limits import Price
    from m3agent.media import Image, Video
    from m3agent.options import RunOptions
    from m3agent.runtime import Runtime, Sampling, Usage
    from m3agent.session import Session
    from m3agent.sessions import SavedSession, Sessions
    from m3agent.stream import RunStream
    from m3agent.tools import Context, Tool, tool

_MODULES = {
    "m3agent.agent": ("Agent",),
    "m3agent.compaction": ("Compaction",),
    "m3agent.content": (
        "Message",
        "Summary",
        "Text",
        "Thinking",
        "ToolCall",
        "ToolChange",
        "ToolResult",
        "dump_messages",
        "load_messages",
    ),
    "m3agent.errors": (
        "CacheError",
        "CheckpointError",
        "ConfigError",
        "ContextOverflow",
        "ConversationError",
        "GuideError",
        "ImageError",
        "M3Error",
        "MediaError",
        "MissingDependency",
        "NoOutput",
        "NumericalError",
        "Overloaded",
        "RenderError",
        "RuntimeClosed",
        "SessionBusy",
        "SessionFileError",
        "ToolDefinitionError",
        "ToolError",
        "ToolsetError",
        "VideoError",
    ),
    "m3agent.events": (
        "ApprovalNeeded",
        "CallArguments",
        "CallFinished",
        "CallStarted",
        "Compacted",
        "Done",
        "Event",
        "Reply",
        "TextDelta",
        "ThinkingDelta",
        "ToolFinished",
        "ToolProgress",
        "ToolResultEvent",
        "TurnFinished",
    ),
    "m3agent.hooks": ("Hooks",),
    "m3agent.limits": ("Price",),
    "m3agent.media": ("Image", "Video"),
    "m3agent.options": ("RunOptions",),
    "m3agent.runtime": ("Runtime", "Sampling", "Usage"),
    "m3agent.session": ("Session",),
    "m3agent.sessions": ("SavedSession", "Sessions"),
    "m3agent.stream": ("RunStream",),
    "m3agent.tools": ("Context", "Tool", "tool"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Agent",
    "ApprovalNeeded",
    "CacheError",
    "CallArguments",
    "CallFinished",
    "CallStarted",
    "CheckpointError",
    "Compacted",
    "Compaction",
    "ConfigError",
    "Context",
    "ContextOverflow",
    "ConversationError",
    "Done",
    "Event",
    "GuideError",
    "Hooks",
    "Image",
    "ImageError",
    "M3Error",
    "MediaError",
    "Message",
    "MissingDependency",
    "NoOutput",
    "NumericalError",
    "Overloaded",
    "Price",
    "RenderError",
    "Reply",
    "RunOptions",
    "RunStream",
    "Runtime",
    "RuntimeClosed",
    "Sampling",
    "SavedSession",
    "Session",
    "SessionBusy",
    "SessionFileError",
    "Sessions",
    "Summary",
    "Text",
    "TextDelta",
    "Thinking",
    "ThinkingDelta",
    "Tool",
    "ToolCall",
    "ToolChange",
    "ToolDefinitionError",
    "ToolError",
    "ToolFinished",
    "ToolProgress",
    "ToolResult",
    "ToolResultEvent",
    "ToolsetError",
    "TurnFinished",
    "Usage",
    "Video",
    "VideoError",
    "dump_messages",
    "load_messages",
    "loops",
    "tool",
    "tools",
]


def __getattr__(name: str) -> Any:
    if name in ("loops", "tools"):
        return importlib.import_module(f"m3agent.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'm3agent' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
