"""Rendering: the released template's own output, byte for byte, and what it would silently drop."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from m3agent.chat import (
    ChatCall,
    ChatMessage,
    MediaPart,
    Text,
    Tokenizer,
    encode,
    render,
    render_next,
    segments_to_text,
)
from m3agent.errors import ConversationError, ToolDefinitionError

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


CALLING = ChatMessage("assistant", [], None, [ChatCall("f", {})])
BAD = [
    ([ChatMessage("user", ["q"]), ChatMessage("developer", ["late"])], "can only open"),
    ([ChatMessage("system", ["a"]), ChatMessage("root", ["b"])], "can only open"),
    ([ChatMessage("system", ["a"]), ChatMessage("developer", ["b"])], "can only open"),
    ([ChatMessage("function", ["a"])], "unknown role 'function'"),  # type: ignore[arg-type]
    ([ChatMessage("user", [{"type": "image_url"}])], "must be text, an image or a video, not dict"),  # type: ignore[list-item]
    ([ChatMessage("user", "text")], "not one string"),
    ([ChatMessage("assistant", [IMAGE])], "belong to user and tool messages"),
    ([ChatMessage("system", [IMAGE])], "belong to user and tool messages"),
    ([ChatMessage("user", ["q"], "hm")], "only assistant messages think"),
    ([ChatMessage("user", ["q"]), ChatMessage("tool", ["r"])], "needs an assistant message with a call"),
    ([CALLING, ChatMessage("assistant", ["a"]), ChatMessage("tool", ["r"])], "needs an assistant message with a call"),
    ([ChatMessage("assistant", [], None, [ChatCall("f", '{"a": 1}')])], "not an object"),  # type: ignore[arg-type]
    ([ChatMessage("assistant", [], None, [ChatCall("f", {"a": {1}})])], "no JSON value: set"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "problem"), BAD, ids=range(len(BAD)))
def test_what_the_format_cannot_express_is_refused(messages: list[ChatMessage], problem: str):
    with pytest.raises(ConversationError, match=problem):
        render(messages)


def test_a_tool_needs_a_name():
    with pytest.raises(ToolDefinitionError, match="needs a name"):
        render([ChatMessage("user", ["q"])], [{"type": "function", "function": {"name": "f"}}])


def test_a_tool_line_holds_three_keys_in_one_order():
    tool = {"parameters": {"b": 1, "a": 2}, "strict": True, "description": None, "name": "f"}
    assert '<tool>{"name": "f", "parameters": {"b": 1, "a": 2}}</tool>\n' in segments_to_text(render([], [tool]))


def test_nesting_that_cannot_be_read_back_is_refused():
    value: Any = "x"
    for _ in range(128):
        value = [value]
    with pytest.raises(ConversationError, match="deeper than 128"):
        render([ChatMessage("assistant", [], None, [ChatCall("f", {"a": value})])])
    render([ChatMessage("assistant", [], None, [ChatCall("f", {"a": value[0]})])])


def test_numbers_are_written_as_python_prints_them():
    calls = [ChatCall("f", {"a": 1.0, "b": 1e20, "c": -0.5, "d": 10**20, "e": False})]
    text = segments_to_text(render([ChatMessage("assistant", [], None, calls)]))
    assert [text.split(f"<{key}>")[1].split("]<]")[0] for key in "abcde"] == [
        "1.0", "1e+20", "-0.5", "100000000000000000000", "false",
    ]  # fmt: skip


def test_empty_instructions_count_as_none():
    plain = render([ChatMessage("user", ["q"])])
    assert render([ChatMessage("root", [""]), ChatMessage("developer", [""]), ChatMessage("user", ["q"])]) == plain


def test_pictures_become_placeholders_between_brackets(tokenizer: Tokenizer):
    messages = [ChatMessage("user", ["a", IMAGE, IMAGE, "b"])]
    prompt = encode(render(messages), tokenizer)
    picture = "]<]start of image[>[" + "]<]image[>[" * 4 + "]<]end of image[>["
    assert tokenizer.decode(prompt.ids).endswith(f"]~b]user\na{picture}{picture}b[e~[\n]~b]ai\n")
    assert [patches for _, patches in prompt.media] == [IMAGE.patches] * 2
    for offset, patches in prompt.media:
        found = prompt.ids[offset - 1 : offset + patches.tokens + 1]
        assert found[1:-1] == [tokenizer.control_id("]<]image[>[")] * 4
        assert found[0] == tokenizer.control_id("]<]start of image[>[")
        assert found[-1] == tokenizer.control_id("]<]end of image[>[")


def test_a_film_becomes_time_marks_and_image_brackets_around_video_placeholders(tokenizer: Tokenizer):
    pair = "]<]start of image[>[]<]video[>[]<]video[>[]<]end of image[>["
    prompt = encode(render([ChatMessage("user", ["Film: ", VIDEO])]), tokenizer)
    expected = f"Film: ]<]0.0 seconds[>[{pair}]<]2.0 seconds[>[{pair}[e~["
    assert expected in tokenizer.decode(prompt.ids)
    (offset, patches) = prompt.media[0]
    assert patches is VIDEO.patches
    assert prompt.ids[offset] == tokenizer.control_id("]<]video[>[")
    assert prompt.ids.index(prompt.ids[offset]) == offset
    mark = tokenizer.encode("]<]2.0 seconds[>[")
    assert prompt.ids[offset + 3 : offset + 3 + len(mark)] == mark  # encoded alone
    untimed = MediaPart(FakePatches("video", 4, tokens_per_frame=2))
    assert f"Film: {pair}{pair}[e~[" in tokenizer.decode(
        encode(render([ChatMessage("user", ["Film: ", untimed])]), tokenizer).ids
    )
    with pytest.raises(ConversationError, match="does not fit"):
        encode(render([ChatMessage("user", [MediaPart(FakePatches("video", 5, 2, (0.0, 2.0)))])]), tokenizer)


def test_neighbouring_texts_are_encoded_as_one(tokenizer: Tokenizer):
    assert encode([Text("seco"), Text("nds")], tokenizer).ids == tokenizer.encode("seconds")
