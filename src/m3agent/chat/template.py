"""A checkpoint's own chat_template.jinja, used where it is not the released one; outside text stays text there too.

The template never sees a text from outside: it gets an unguessable placeholder for each, and the placeholders in its
output are replaced by Text segments afterwards. Control tokens can so come from the template's own words alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from m3agent.chat import markers
from m3agent.chat.messages import ChatCall, ChatMessage, MediaPart, Thinking, check_message, plain_text, split_head
from m3agent.chat.placeholders import Placeholders
from m3agent.chat.render import check_mode, render, render_next
from m3agent.chat.segments import Control, Segment
from m3agent.chat.tokenizer import Tokenizer
from m3agent.errors import CheckpointError, ConversationError
from m3agent.json_file import read_object, read_text

# MiniMaxAI/MiniMax-M3's file with LF line ends; m3agent.chat.render writes the same bytes.
_RELEASED = "11421244f67553498e5c8112dae02802025bcc4305ec45ad380af95c96f9fe64"


class ChatFormat:
    """How a checkpoint wants its conversations written: `render` and `render_next` as in m3agent.chat.

    `template_differs` says that the checkpoint brought another template than MiniMax-M3's, which is used then. What
    such a template does to the inside of a text (trim, split, search) does not happen: texts come through as they are.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None, special: Mapping[str, str] | None = None):
        """source: the text of the template; None for the built-in format. special: bos_token and its like, by name.

        Raises CheckpointError for a template that does not compile.
        """
        released = source is None or hashlib.sha256(source.encode()).hexdigest() == _RELEASED
        self.template_differs = not released
        self._control = tuple(tokenizer.control)
        self._special = dict(special or {})
        try:
            self._code = _environment(Placeholders()).compile(source or "")
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat_template.jinja does not compile: {error}") from error

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatFormat:
        """The format of the checkpoint in `folder`: its chat_template.jinja if it has one."""
        source = read_text(Path(folder) / "chat_template.jinja")
        if source is None:
            return cls(tokenizer)
        return cls(tokenizer, source, _special_tokens(Path(folder)))

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: Thinking = "adaptive",
        generation_prompt: bool = True,
    ) -> list[Segment]:
        """The whole conversation. Raises ConversationError where the template loses or rewrites a text."""
        if not self.template_differs:
            return render(messages, tools, thinking, generation_prompt)
        check_mode(thinking)
        split_head(messages)
        places = Placeholders()
        variables = {
            **self._special,
            "messages": _api_messages(messages, places),
            "tools": [{"type": "function", "function": places.function(tool)} for tool in tools] or None,
            "add_generation_prompt": generation_prompt,
            "thinking_mode": thinking,
        }
        try:
            environment = _environment(places)
            text = jinja2.Template.from_code(environment, self._code, environment.make_globals(None)).render(variables)
        except jinja2.TemplateError as error:
            raise ConversationError(f"the checkpoint's chat template refuses the conversation: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConversationError(f"the checkpoint's chat template failed: {error}") from error
        media = [part for message in messages for part in message.parts if isinstance(part, MediaPart)]
        return places.segments(text, self._control, media)

    def render_next(
        self, messages: Sequence[ChatMessage], thinking: Thinking = "adaptive", *, after_cut: bool = False
    ) -> list[Segment]:
        """What follows a generated turn whose ids are kept.

        A template of another checkpoint renders whole conversations only, so this is what `messages` add to a short
        one. Raises ConversationError if they change what stands before them: no session can follow such a template.
        """
        if not self.template_differs:
            return render_next(messages, thinking, after_cut=after_cut)
        for message in messages:
            check_message(message)
        calls = [ChatCall("f", {})] if messages and messages[0].role == "tool" else []
        turn = [ChatMessage("user", ["q"]), ChatMessage("assistant", ["a"], None, calls)]
        before = self.render(turn, (), thinking, False)
        after = self.render([*turn, *messages], (), thinking, True)
        end = max((at for at, segment in enumerate(before) if segment == Control(markers.END)), default=-1)
        if end < 0 or before[: end + 1] != after[: end + 1]:
            raise ConversationError(
                "the checkpoint's chat template does not end turns with [e~[ or rewrites earlier turns, so a session "
                "cannot append to it"
            )
        return after[end if after_cut else end + 1 :]


def _environment(places: Placeholders) -> jinja2.Environment:
    """The settings that chat templates are written for (Hugging Face's)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = places.to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _special_tokens(folder: Path) -> dict[str, str]:
    config = read_object(folder / "tokenizer_config.json") or {}
    found = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _api_messages(messages: Sequence[ChatMessage], places: Placeholders) -> list[dict[str, Any]]:
    """Messages in the form that chat templates expect, with placeholders for all their texts."""
    found: list[dict[str, Any]] = []
    numbers: list[str] = []  # call ids not answered yet
    made = 0
    for message in messages:
        what = f"the text of a {message.role} message"
        entry: dict[str, Any] = {"role": message.role}
        if any(isinstance(part, MediaPart) for part in message.parts):
            entry["content"] = [
                {"type": "text", "text": places.text(part, what)}
                if isinstance(part, str)
                else {"type": part.patches.kind}
                for part in message.parts
            ]
        else:
            entry["content"] = places.text(plain_text(message), what)
        if message.role == "assistant":
            # Some templates leave earlier thinking out; that is theirs to decide.
            entry["reasoning_content"] = places.text(message.thinking or "", None)
            numbers = [f"call_{made + at}" for at in range(len(message.calls))]
            made += len(numbers)
            if message.calls:
                entry["tool_calls"] = [
                    {"id": number, "type": "function", "function": places.call(call)}
                    for number, call in zip(numbers, message.calls, strict=True)
                ]
        elif message.role == "tool":
            entry["tool_call_id"] = numbers.pop(0) if numbers else ""
        found.append(entry)
    return found
