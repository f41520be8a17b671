"""A session that keeps generated ids and appends: the same prompt as rendering the whole conversation again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Bpe

from m3agent.chat import ChatCall, ChatMessage, MediaPart, Tokenizer, encode, render, render_next, segments_to_text
from m3agent.errors import ConversationError

from .conftest import FakePatches, tokenizer_json

TOY = tokenizer_json()
TOKENIZER = Tokenizer(TOY)
NAIVE = Bpe.from_str(TOY)
TOOLS = [{"name": "draw", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}]

words = st.text(alphabet="abcø \n.<", min_size=1, max_size=12)
media = st.sampled_from([MediaPart(FakePatches("image", 3)), MediaPart(FakePatches("video", 4, 2, (0.0, 2.0)))])
parts = st.lists(st.one_of(words, media), min_size=1, max_size=3)
calls = st.lists(st.builds(ChatCall, st.just("draw"), st.fixed_dictionaries({"code": words})), min_size=1, max_size=2)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[list[ChatMessage]]]:
    """(mode, groups): messages before the first turn, a turn, messages before the next turn, and so on."""
    mode = draw(st.sampled_from(["adaptive", "enabled", "disabled"]))
    groups = [[ChatMessage("user", draw(parts))]]
    for _ in range(draw(st.integers(1, 4))):
        thinking = draw({"adaptive": st.none() | words, "enabled": words, "disabled": st.none()}[mode])
        turn = ChatMessage("assistant", [draw(words)], thinking, draw(st.just([]) | calls))
        results = [ChatMessage("tool", draw(parts)) for _ in turn.calls]
        users = [ChatMessage("user", draw(parts)) for _ in range(draw(st.integers(0 if results else 1, 2)))]
        groups += [[turn], [*results, *users]]
    return mode, groups


def generated(turn: ChatMessage, mode: Any) -> list[int]:
    """The ids that a model writes for a turn in canonical form: all after the generation prompt, with the end token."""
    question = [ChatMessage("user", ["q"])]
    prompt = segments_to_text(render(question, (), mode))
    whole = segments_to_text(render([*question, turn], (), mode, generation_prompt=False))
    assert whole.startswith(prompt)
    return NAIVE.encode(whole[len(prompt) :].removesuffix("\n"), add_special_tokens=False).ids


@given(conversations())
def test_appending_equals_rendering_again(conversation: tuple[Any, list[list[ChatMessage]]]):
    mode, groups = conversation
    so_far = list(groups[0])
    log = encode(render(so_far, TOOLS, mode), TOKENIZER)
    for turn, following in zip(groups[1::2], groups[2::2], strict=True):
        log.ids += generated(turn[0], mode)
        appended = encode(render_next(following, mode), TOKENIZER)
        log.media += [(len(log.ids) + offset, patches) for offset, patches in appended.media]
        log.ids += appended.ids
        so_far += [*turn, *following]
        again = encode(render(so_far, TOOLS, mode), TOKENIZER)
        # The log only ever grew, so equality at each turn makes each prompt a prefix of the next.
        assert again == log


@pytest.mark.parametrize("mode", ["adaptive", "enabled", "disabled"])
def test_a_turn_cut_short_is_ended_first(mode: Any):
    text = segments_to_text(render_next([ChatMessage("user", ["Go on."])], mode, after_cut=True))
    prompt = {"adaptive": "", "enabled": "<mm:think>", "disabled": "</mm:think>"}[mode]
    assert text == f"[e~[\n]~b]user\nGo on.[e~[\n]~b]ai\n{prompt}"
    after = segments_to_text(render_next([ChatMessage("user", ["Go on."])], mode))
    assert text == "[e~[" + after


def test_results_that_come_together_are_one_message():
    results = [
        ChatMessage("tool", ["1"]),
        ChatMessage("tool", ["2"]),
        ChatMessage("user", ["u"]),
        ChatMessage("tool", []),
    ]
    assert segments_to_text(render_next(results)) == (
        "\n]~b]tool\n<response>1</response>\n<response>2</response>[e~[\n]~b]user\nu[e~[\n"
        "]~b]tool\n<response></response>[e~[\n]~b]ai\n"
    )


def test_only_users_and_tools_follow_a_turn():
    for role in ("system", "developer", "root", "assistant"):
        with pytest.raises(ConversationError, match="only user messages and tool results"):
            render_next([ChatMessage(role, ["x"])])
