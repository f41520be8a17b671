"""A checkpoint's own template: the text that Hugging Face's renderer makes of it, with outside text still only text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Bpe
from transformers import PreTrainedTokenizerFast

from m3agent.chat import (
    ChatCall,
    ChatFormat,
    ChatMessage,
    Media,
    MediaPart,
    Segment,
    Tokenizer,
    encode,
    render,
    render_next,
    segments_to_text,
)
from m3agent.chat.placeholders import _KEYWORDS, _TYPES
from m3agent.errors import CheckpointError, ConversationError

from .conftest import CONTROL, FakePatches, outside_text, tokenizer_json

SOURCE = (Path(__file__).parent / "data" / "other_template.jinja").read_text()
TOY = tokenizer_json()
TOKENIZER = Tokenizer(TOY)
OTHER = ChatFormat(TOKENIZER, SOURCE)
IMAGE, VIDEO = MediaPart(FakePatches("image", 2)), MediaPart(FakePatches("video", 2, 2))


def messages(text: str = "ø “x”\n\\ y") -> list[ChatMessage]:
    return [
        ChatMessage("developer", [text]),
        ChatMessage("user", [text, IMAGE, text, VIDEO, IMAGE]),
        ChatMessage("assistant", [text], text, [ChatCall(text, {text: [text, 1, {text: None, "k": 0.5}, True]})]),
        ChatMessage("tool", [text, IMAGE]),
    ]


def tools(text: str = 'ø "d"') -> list[dict[str, Any]]:
    properties = {text: {"type": "string", "description": text}, "size": {"type": "integer", "enum": [1, 2]}}
    parameters = {"type": "object", "properties": properties, "required": [text]}
    return [{"name": text, "description": text, "parameters": parameters}]


def by_transformers(source: str, conversation: list[ChatMessage], **options: Any) -> str:
    def content(message: ChatMessage) -> Any:
        if all(isinstance(part, str) for part in message.parts):
            return "".join(map(str, message.parts))
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.patches.kind}
            for part in message.parts
        ]

    api = [
        {
            "role": message.role,
            "content": content(message),
            "reasoning_content": message.thinking or "",
            "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in message.calls],
        }
        for message in conversation
    ]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Bpe.from_str(TOY), chat_template=source)
    return str(tokenizer.apply_chat_template(api, tokenize=False, **options))


@pytest.mark.parametrize("mode", ["adaptive", "enabled", "disabled"])
@pytest.mark.parametrize("text", ['plain "quoted" ø', "{{ 1 }} {% x %} \\n </a>"])
def test_the_text_is_what_transformers_renders(mode: Any, text: str):
    declared = [{"type": "function", "function": tool} for tool in tools()]
    options = {"tools": declared, "add_generation_prompt": True, "thinking_mode": mode}
    expected = by_transformers(SOURCE, messages(text), **options)
    assert segments_to_text(OTHER.render(messages(text), tools(), mode)) == expected


def test_texts_come_through_as_they_are():
    """The template's `trim` sees a placeholder."""
    assert "]~b]user\n  padded\t\n[e~[" in segments_to_text(OTHER.render([ChatMessage("user", ["  padded\t"])]))


def test_a_differing_template_says_so(tmp_path: Path):
    assert OTHER.template_differs
    (tmp_path / "chat_template.jinja").write_bytes(SOURCE.replace("\n", "\r\n").encode())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "]~!b["}, "eos_token": "x"}))
    loaded = ChatFormat.load(tmp_path, TOKENIZER)
    assert loaded.template_differs
    assert loaded.render(messages()) == OTHER.render(messages())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ messages[0].content }}")
    one = ChatFormat.load(tmp_path, TOKENIZER).render([ChatMessage("user", ["hi"])])
    assert segments_to_text(one) == "]~!b[xhi"


def test_without_a_template_the_built_in_format_is_used(tmp_path: Path):
    built_in = ChatFormat.load(tmp_path, TOKENIZER)
    assert not built_in.template_differs
    assert built_in.render(messages(), tools(), "enabled") == render(messages(), tools(), "enabled")
    added = [ChatMessage("tool", ["r"])]
    assert built_in.render_next(added, "enabled", after_cut=True) == render_next(added, "enabled", after_cut=True)


def control_ids(segments: list[Segment]) -> list[int]:
    return [number for number in encode(segments, TOKENIZER).ids if TOKENIZER.is_control(number)]


@given(outside_text.filter(str.strip))
def test_outside_text_stays_text(text: str):
    segments = OTHER.render(messages(text), tools(text))
    assert control_ids(segments) == control_ids(OTHER.render(messages("x"), tools("x")))
    without_media = [segment for segment in segments if not isinstance(segment, Media)]
    assert TOKENIZER.decode(encode(without_media, TOKENIZER).ids) == segments_to_text(without_media)


@pytest.mark.parametrize("control", CONTROL)
def test_a_name_inside_the_brackets_of_the_template_makes_no_control_token(control: str):
    """The template writes <name>: the name of a call must not complete a token such as <think>."""
    name = control.strip("<>/")
    calls = [ChatCall(name, {name: name})]
    segments = OTHER.render([ChatMessage("user", ["q"]), ChatMessage("assistant", ["a"], None, calls)])
    assert f"<{name}>" in segments_to_text(segments)
    assert TOKENIZER.control.get(f"<{name}>") not in control_ids(segments)


def test_words_that_templates_may_look_for_complete_no_control_token():
    assert not [(word, control) for word in _KEYWORDS | _TYPES for control in CONTROL if word in control]


@pytest.mark.parametrize("mode", ["adaptive", "enabled"])
@pytest.mark.parametrize("first", ["user", "tool"])
def test_appended_messages_are_what_they_add(mode: Any, first: Any):
    added = [ChatMessage(first, ["one", IMAGE]), ChatMessage("user", ["two"])]
    calls = [ChatCall("f", {"a": 1})]
    before = [ChatMessage("user", ["q"]), ChatMessage("assistant", ["a"], None, calls)]
    whole = segments_to_text(OTHER.render([*before, *added], (), mode))
    start = segments_to_text(OTHER.render(before, (), mode, False)).removesuffix("\n")
    assert start.endswith("[e~[")
    assert start + segments_to_text(OTHER.render_next(added, mode)) == whole
    assert segments_to_text(OTHER.render_next(added, mode, after_cut=True)) == "[e~[" + whole.removeprefix(start)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ messages[0].content | upper }}", "rewrites"),
        ("{{ messages[0].content[:9] }}", "leaves out or rewrites the text of a user message"),
        ("{{ messages[0].content[1:] }}", "rewrites"),
        ("{{ messages[1].content }}", "leaves out or rewrites the text of a user message"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "leaves out or rewrites the name of a call"),
        ("{% for m in messages %}{{ m | tojson(sort_keys=true) }}{% endfor %}", "sorts JSON keys"),
        ("{{ messages | tojson }}]<]image[>[", "more image markers"),
        ("{{ raise_exception('no such role') }}", "refuses the conversation: no such role"),
        ("{{ messages[0].nothing.more }}", "refuses the conversation"),
        ("{{ 1 + 'a' }}", "failed"),
        ("{{ messages.__class__.__mro__ }}", "refuses the conversation"),
    ],
)
def test_templates_that_lose_or_rewrite_text_are_refused(source: str, problem: str):
    conversation = [ChatMessage("user", ["question"]), ChatMessage("assistant", ["answer"], "t", [ChatCall("f", {})])]
    with pytest.raises(ConversationError, match=problem):
        ChatFormat(TOKENIZER, source).render(conversation)


def test_a_template_that_leaves_out_a_picture_is_refused():
    with pytest.raises(ConversationError, match="leaves out a picture"):
        ChatFormat(TOKENIZER, "{{ messages[0].content[0].text }}").render([ChatMessage("user", ["a", IMAGE])])


def test_a_session_cannot_follow_a_template_that_rewrites_the_past():
    source = "{% for m in messages %}{{ m.content }}{{ loop.revindex }}[e~[{% endfor %}"
    with pytest.raises(ConversationError, match="rewrites earlier turns"):
        ChatFormat(TOKENIZER, source).render_next([ChatMessage("user", ["u"])])
    source = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ConversationError, match="does not end turns"):
        ChatFormat(TOKENIZER, source).render_next([ChatMessage("user", ["u"])])


def test_late_instructions_are_refused_for_any_template():
    with pytest.raises(ConversationError, match="can only open"):
        OTHER.render([ChatMessage("user", ["q"]), ChatMessage("system", ["late"])])


def test_a_broken_template_is_told_when_it_is_loaded():
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatFormat(TOKENIZER, "{% if %}")


@given(st.text(alphabet='ab"\\\nø', min_size=1).filter(str.strip))
def test_text_inside_json_is_escaped_as_often_as_the_template_wraps_it(text: str):
    source = "{{ {'a': (messages[0] | tojson)} | tojson(ensure_ascii=true, indent=1) }}"
    rendered = segments_to_text(ChatFormat(TOKENIZER, source).render([ChatMessage("user", [text])]))
    inner = json.dumps({"role": "user", "content": text}, ensure_ascii=False)
    assert rendered == json.dumps({"a": inner}, indent=1)
