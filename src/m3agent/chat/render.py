"""Messages to segments: MiniMax-M3's chat format, byte for byte as its released template writes it.

Where that template drops something without a word (late instructions, unknown parts, unknown thinking modes),
this renderer raises ConversationError instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from m3agent.chat import markers
from m3agent.chat.elements import write_calls
from m3agent.chat.messages import THINKING_MODES, ChatMessage, Thinking, check_message, plain_text, split_head
from m3agent.chat.segments import Segment, SegmentWriter, encode, segments_to_text
from m3agent.errors import ConversationError, ToolDefinitionError

__all__ = ["encode", "render", "render_next", "segments_to_text", "tool_json"]

_IDENTITY = (
    "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. Founded in early 2022, "
    "MiniMax is a global AI foundation model company committed to advancing the frontiers of AI towards AGI."
)
_INSTRUCTIONS = "You are a helpful assistant."
_THINKING = (
    "You have a thinking capability that allows you to reason step by step before responding. When thinking is "
    "enabled, wrap your reasoning in <mm:think></mm:think> tags before your response. When thinking is disabled, "
    "begin your response directly after the </mm:think> prefix. When thinking is adaptive, decide on your own whether "
    "to think for the current turn.\n"
)
_MODE_LINES = {
    "enabled": "enabled. You MUST think step by step before every response, including after receiving function/tool "
    "results.",
    "disabled": "disabled. Do not output any thinking process.",
    "adaptive": "adaptive. You are encouraged to think for complex decision-making, multi-step reasoning, or when "
    "analyzing function/tool results.",
}
_TOOLS_BEFORE = (
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n"
)
_TOOLS_AFTER = (
    "</tools>\n\nTo call tools, wrap all invocations in a single {ns}<tool_call>{ns}</tool_call> block. Parameter "
    "values containing nested objects or arrays are recursively expanded into XML elements. Example:\n\n"
    "{ns}<tool_call>\n"
    '{ns}<invoke name="tool-name-1">{ns}<param-1>value-1{ns}</param-1>{ns}<param-2>{ns}<item>{ns}<key-a>val-a'
    "{ns}</key-a>{ns}<key-b>val-b{ns}</key-b>{ns}</item>{ns}</param-2>{ns}</invoke>\n"
    '{ns}<invoke name="tool-name-2">{ns}<param-1>value-1{ns}</param-1>{ns}</invoke>\n'
    "{ns}</tool_call>"
).replace("{ns}", markers.NS)


def render(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: Thinking = "adaptive",
    generation_prompt: bool = True,
) -> list[Segment]:
    """The whole conversation. `tools` are function objects: {"name", "description"?, "parameters"?}.

    Raises ConversationError for messages that the format cannot express, ToolDefinitionError for a nameless tool.
    """
    check_mode(thinking)
    identity, instructions, rest = split_head(messages)
    out = SegmentWriter()
    out.template(f"{markers.DOCUMENT}{markers.ROLE}system\n")
    out.text(identity or _IDENTITY)
    mode_line = f"Current thinking mode: {_MODE_LINES[thinking]}\n"
    out.template(f"\n\n<thinking_instructions>\n{_THINKING}{mode_line}</thinking_instructions>{markers.END}\n")
    out.template(f"{markers.ROLE}developer\n")
    out.text(instructions or _INSTRUCTIONS)
    if tools:
        out.template(_TOOLS_BEFORE)
        for tool in tools:
            out.text(f"<tool>{tool_json(tool)}</tool>\n")
        out.template(_TOOLS_AFTER)
    out.template(f"{markers.END}\n")
    _write_messages(rest, out)
    if generation_prompt:
        _write_generation_prompt(thinking, out)
    return out.done()


def render_next(
    messages: Sequence[ChatMessage], thinking: Thinking = "adaptive", *, after_cut: bool = False
) -> list[Segment]:
    """What follows a generated turn whose ids are kept: user messages or tool results, and a generation prompt.

    A turn that ended by itself has the end token as its last id; the newline after it comes from here. `after_cut`
    says that it has not (a token limit, a cancelled stream, another stop token taken off), and ends it first.
    """
    check_mode(thinking)
    for message in messages:
        check_message(message)
        if message.role not in ("user", "tool"):
            raise ConversationError(f"only user messages and tool results follow a turn, not {message.role!r}")
    out = SegmentWriter()
    if after_cut:
        out.control(markers.END)
    out.text("\n")
    _write_messages(messages, out)
    _write_generation_prompt(thinking, out)
    return out.done()


def tool_json(tool: Mapping[str, Any]) -> str:
    """The one line of JSON that declares a tool: name, description, parameters; absent ones are left out.

    It stands near the front of every prompt, so its spelling must not change between turns.
    """
    if not tool.get("name"):
        raise ToolDefinitionError(f"a tool needs a name; this one has none: {dict(tool)!r:.200}")
    shown = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return json.dumps(shown, ensure_ascii=False)


def _write_messages(messages: Sequence[ChatMessage], out: SegmentWriter) -> None:
    previous = None
    for place, message in enumerate(messages):
        role = "ai" if message.role == "assistant" else message.role
        if role == "tool":  # a run of results is one message
            if previous != "tool":
                out.template(f"{markers.ROLE}tool")
            out.text("\n<response>")
            out.parts(message.parts)
            out.text("</response>")
            following = messages[place + 1].role if place + 1 < len(messages) else None
            if following != "tool":
                out.template(f"{markers.END}\n")
        else:
            out.template(f"{markers.ROLE}{role}\n")
            if role == "ai":
                _write_turn(message, out)
            else:
                out.parts(message.parts)
            out.template(f"{markers.END}\n")
        previous = role


def _write_turn(message: ChatMessage, out: SegmentWriter) -> None:
    """An assistant's turn; one without thinking keeps a bare closer, in every turn of the history."""
    if message.thinking:
        out.control(markers.THINK)
        out.text(message.thinking)
    out.control(markers.THINK_END)
    out.text(plain_text(message))
    write_calls(message.calls, out)


def _write_generation_prompt(thinking: Thinking, out: SegmentWriter) -> None:
    out.template(f"{markers.ROLE}ai\n")
    if thinking == "enabled":
        out.control(markers.THINK)
    elif thinking == "disabled":
        out.control(markers.THINK_END)


def check_mode(thinking: str) -> None:
    """Raises ConversationError for a thinking mode that the format does not have."""
    if thinking not in THINKING_MODES:
        raise ConversationError(f"unknown thinking mode {thinking!r}: use one of {', '.join(THINKING_MODES)}")
