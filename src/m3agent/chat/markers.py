"""The control tokens that the chat format uses, by their spelling. Ids differ between tokenizers; look them up."""

from __future__ import annotations

DOCUMENT = "]~!b["  # begin of document, once
ROLE = "]~b]"  # begins a message; the role's name after it is ordinary text
END = "[e~["  # ends a message; the stop token
NS = "]<]minimax[>["  # before every tag of a tool call
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<mm:think>", "</mm:think>"
IMAGE, VIDEO = "]<]image[>[", "]<]video[>["  # one per merged patch
MEDIA_START, MEDIA_END = "]<]start of image[>[", "]<]end of image[>["  # around pictures and around film frames
