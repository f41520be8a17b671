"""Stand-ins for texts from outside while a foreign template runs, and their way back as Text segments."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from m3agent.chat import markers
from m3agent.chat.messages import ChatCall, MediaPart
from m3agent.chat.segments import Segment, SegmentWriter
from m3agent.errors import ConversationError

# What a template may look for in a tool's JSON schema. None of it is, or completes, a control token.
_KEYWORDS = frozenset(
    ("type", "properties", "required", "description", "title", "items", "enum", "default", "anyOf", "oneOf", "allOf",
     "const", "format", "minimum", "maximum", "pattern", "additionalProperties", "nullable", "$defs", "$ref")
)  # fmt: skip
_TYPES = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))


class Placeholders:
    """The placeholders of one rendering. A text's placeholder is `x<nonce>n<number>x`; each `to_json` around it adds
    a letter before the last x, which says how the text must be escaped when it returns."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(16)
        self._pattern = re.compile(f"x{self._nonce}n([0-9]+)([ua]*)x")
        self._texts: list[str] = []
        self._needed: dict[int, str] = {}  # number -> what is lost if the output lacks it
        self._names: dict[str, str] = {}

    def text(self, text: str, what: str | None) -> str:
        """A placeholder of its own. `what` names it in the error if the template loses it; None lets it go.
        Blank text goes as it is: templates ask whether there is text, and no control token is blank."""
        if not text.strip():
            return text
        self._texts.append(text)
        number = len(self._texts) - 1
        if what is not None:
            self._needed[number] = what
        return f"x{self._nonce}n{number}x"

    def name(self, text: str, what: str) -> str:
        """One placeholder for all places of the same name, so that a template can compare names."""
        if text not in self._names:
            self._names[text] = self.text(text, what)
        return self._names[text]

    def function(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """A tool's function object: name, description and parameters with placeholders inside."""
        if not tool.get("name"):
            raise ConversationError(f"a tool needs a name; this one has none: {dict(tool)!r:.200}")
        shown: dict[str, Any] = {"name": self.name(tool["name"], "the name of a tool")}
        if tool.get("description") is not None:
            shown["description"] = self.text(tool["description"], "the description of a tool")
        if tool.get("parameters") is not None:
            shown["parameters"] = self._json(tool["parameters"], "the parameters of a tool", _KEYWORDS, _TYPES)
        return shown

    def call(self, call: ChatCall) -> dict[str, Any]:
        what = "the arguments of a call"
        return {"name": self.name(call.name, "the name of a call"), "arguments": self._json(call.arguments, what)}

    def to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The `tojson` filter of chat templates: plain JSON without HTML escapes."""
        if sort_keys:
            raise ConversationError("the checkpoint's chat template sorts JSON keys, which is not supported")
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
        letter = "a" if ensure_ascii else "u"
        return self._pattern.sub(lambda match: f"{match[0][:-1]}{letter}x", text)

    def segments(self, rendered: str, control: Iterable[str], media: Sequence[MediaPart]) -> list[Segment]:
        """A template's output: its own control tokens, the texts in place of their placeholders, the media in order.

        Raises ConversationError if a placeholder was lost or cut up, or if media and their markers do not match.
        """
        out = SegmentWriter()
        waiting = {kind: [part for part in media if part.patches.kind == kind] for kind in ("image", "video")}
        marked = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))
        at = 0
        seen: set[int] = set()
        for place in self._pattern.finditer(rendered):
            self._own_words(rendered[at : place.start()], marked, waiting, out)
            number = int(place[1])
            seen.add(number)
            text = self._texts[number]
            for letter in place[2]:
                text = json.dumps(text, ensure_ascii=letter == "a")[1:-1]
            out.text(text)
            at = place.end()
        self._own_words(rendered[at:], marked, waiting, out)
        lost = [what for number, what in self._needed.items() if number not in seen]
        if lost:
            raise ConversationError(f"the checkpoint's chat template leaves out or rewrites {lost[0]}")
        if any(waiting.values()):
            raise ConversationError("the checkpoint's chat template leaves out a picture or film")
        return out.done()

    def _own_words(
        self, text: str, marked: re.Pattern[str], waiting: dict[str, list[MediaPart]], out: SegmentWriter
    ) -> None:
        if self._nonce in text.lower():
            raise ConversationError("the checkpoint's chat template rewrites a text of the conversation")
        at = 0
        for found in marked.finditer(text):
            out.text(text[at : found.start()])
            kind = {markers.IMAGE: "image", markers.VIDEO: "video"}.get(found[0])
            if kind is None:
                out.control(found[0])
            elif waiting[kind]:
                out.parts([waiting[kind].pop(0)])
            else:
                raise ConversationError(f"the checkpoint's chat template writes more {kind} markers than there are")
            at = found.end()
        out.text(text[at:])

    def _json(self, value: Any, what: str, keys: frozenset[str] = frozenset(), kinds: frozenset[str] = frozenset()):
        """JSON with every string and key replaced, but for the keys and type names of a schema."""
        if isinstance(value, str):
            return value if value in kinds else self.name(value, what)
        if isinstance(value, Mapping):
            return {
                key if key in keys else self.name(str(key), what): self._json(inner, what, keys, kinds)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._json(inner, what, keys, kinds) for inner in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ConversationError(f"{what} hold no JSON value: {type(value).__name__}")
