"""Rendering: the released template's own output, byte for byte, and what it would silently drop."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from m3agent.chat import ChatCall, ChatMessage, MediaPart, render, render_next, segments_to_text
from m3agent.errors import ConversationError

from .conftest import FakePatches

EXAMPLES = json.loads((Path(__file__).parent / "data" / "rendered_examples.json").read_text())["examples"]
IMAGE = MediaPart(FakePatches("image", 4))
VIDEO = MediaPart(FakePatches("video", 4, tokens_per_frame=2, timestamps=(0.0, 2.0)))


def from_api(message: dict[str, Any]) -> ChatMessage:
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    media = {"image": IMAGE, "video": VIDEO}
    return ChatMessage(
        message["role"],
        [part["text"] if part["type"] == "text" else media[part["type"]] for part in parts],
        message.get("reasoning_content"),
        [ChatCall(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())],
    )


def rendered(example: dict[str, Any]) -> str:
    messages = [from_api(message) for message in example["messages"]]
    tools = [tool["function"] for tool in example["tools"] or ()]
    options = example["options"]
    mode = options.get("thinking_mode", "adaptive")
    return segments_to_text(render(messages, tools, mode, options.get("add_generation_prompt", False)))


def test_the_examples_are_whole():
    assert [e["id"] for e in EXAMPLES] == [f"E{n}" for n in range(1, 11)]
    for example in EXAMPLES:
        assert hashlib.sha256(example["rendered"].encode()).hexdigest()[:16] == example["sha256"]


@pytest.mark.parametrize("example", EXAMPLES[:8], ids=lambda e: e["id"])
def test_rendering_equals_the_released_template(example):
    assert rendered(example) == example["rendered"]


def test_late_instructions_are_refused_where_the_template_drops_them():
    example = EXAMPLES[8]
    with pytest.raises(ConversationError, match="'system' message can only open"):
        rendered(example)
    without = [from_api(m) for m in example["messages"] if m["role"] != "system"]
    without[1] = ChatMessage("assistant", ["Ans"], "r")
    assert segments_to_text(render(without)) == example["rendered"]


def test_unknown_thinking_modes_are_refused_where_the_template_loses_the_line():
    with pytest.raises(ConversationError, match="thinking mode 'auto'"):
        rendered(EXAMPLES[9])
    with pytest.raises(ConversationError, match="thinking mode"):
        render_next([ChatMessage("user", ["q"])], "auto")  # type: ignore[arg-type]
