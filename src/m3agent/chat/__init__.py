"""Tokens to messages and back: tokenizer, rendering of the chat format, incremental reading of a reply.

Text from outside is typed as text from the first to the last step and can never become a control token.
"""

from m3agent.chat.elements import check_tool_names
from m3agent.chat.messages import ChatCall, ChatMessage, MediaPart
from m3agent.chat.parse import ReplyParser
from m3agent.chat.parse_events import (
    CallDamaged,
    CallFinished,
    CallProgress,
    CallStarted,
    ParseEvent,
    TextDelta,
    ThinkingDelta,
)
from m3agent.chat.render import render, render_next, tool_json
from m3agent.chat.segments import Control, Media, Prompt, Segment, Text, encode, segments_to_text
from m3agent.chat.template import ChatFormat
from m3agent.chat.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "CallDamaged",
    "CallFinished",
    "CallProgress",
    "CallStarted",
    "ChatCall",
    "ChatFormat",
    "ChatMessage",
    "Control",
    "Detokenizer",
    "Media",
    "MediaPart",
    "ParseEvent",
    "Prompt",
    "ReplyParser",
    "Segment",
    "Text",
    "TextDelta",
    "ThinkingDelta",
    "Tokenizer",
    "check_tool_names",
    "encode",
    "render",
    "render_next",
    "segments_to_text",
    "tool_json",
]
