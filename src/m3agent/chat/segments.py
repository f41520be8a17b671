"""Segments: a prompt before it is tokens. Text, control tokens and media are different types, so that no text,
whatever it spells, can become a control token on the way to ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from m3agent.chat import markers
from m3agent.chat.messages import MediaPart
from m3agent.errors import ConversationError

if TYPE_CHECKING:
    from m3agent.chat.tokenizer import Tokenizer
    from m3agent.media.pixels import Patches


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary text: encoded with no control token in it, whatever it spells."""

    text: str


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, by its spelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or film; `encode` expands it to placeholders."""

    part: MediaPart


Segment = Text | Control | Media


@dataclass
class Prompt:
    """Token ids, and for each picture or film the index in `ids` of its first placeholder token.

    A film's placeholders stand in `tokens / tokens_per_frame` runs with brackets and time marks between them; all
    of them are the same token id, so the rest follow from the first.
    """

    ids: list[int]
    media: list[tuple[int, Patches]] = field(default_factory=list["tuple[int, Patches]"])


class SegmentWriter:
    """Collects segments and merges neighbouring texts, so that they are tokenised as one."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._texts: list[str] = []

    def text(self, text: str) -> None:
        if text:
            self._texts.append(text)

    def control(self, text: str) -> None:
        self._flush()
        self._segments.append(Control(text))

    def parts(self, parts: Iterable[str | MediaPart]) -> None:
        for part in parts:
            if isinstance(part, str):
                self.text(part)
            else:
                self._flush()
                self._segments.append(Media(part))

    def template(self, text: str) -> None:
        """Text of the format itself, in which the spelling of a control token means that token."""
        for segment in _marked(text):
            if isinstance(segment, Control):
                self.control(segment.text)
            else:
                self.text(segment.text)

    def done(self) -> list[Segment]:
        self._flush()
        return self._segments

    def _flush(self) -> None:
        if self._texts:
            self._segments.append(Text("".join(self._texts)))
            self._texts.clear()


_USED = (
    markers.DOCUMENT, markers.ROLE, markers.END, markers.NS, markers.TOOL_CALL, markers.TOOL_CALL_END,
    markers.THINK, markers.THINK_END,
)  # fmt: skip
_USED_PATTERN = re.compile("(" + "|".join(map(re.escape, _USED)) + ")")


@lru_cache(maxsize=64)
def _marked(text: str) -> tuple[Text | Control, ...]:
    pieces = _USED_PATTERN.split(text)  # texts at even places, controls between them
    return tuple(Control(piece) if place % 2 else Text(piece) for place, piece in enumerate(pieces) if piece)


def segments_to_text(segments: Iterable[Segment]) -> str:
    """The text that the released template would write: media as one marker each, not yet expanded."""
    return "".join(
        (markers.IMAGE if segment.part.patches.kind == "image" else markers.VIDEO)
        if isinstance(segment, Media)
        else segment.text
        for segment in segments
    )


def encode(segments: Sequence[Segment], tokenizer: Tokenizer) -> Prompt:
    """Segments to ids. A picture becomes start, one placeholder per merged patch, end; a film becomes the same for
    each pair of frames, with its time mark before it as ordinary text, encoded alone."""
    prompt = Prompt([])
    texts: list[str] = []  # merged again here: a caller may join lists of segments
    for segment in segments:
        if isinstance(segment, Text):
            texts.append(segment.text)
            continue
        if texts:
            prompt.ids += tokenizer.encode("".join(texts))
            texts.clear()
        if isinstance(segment, Control):
            prompt.ids.append(tokenizer.control_id(segment.text))
        else:
            _expand(segment.part.patches, tokenizer, prompt)
    if texts:
        prompt.ids += tokenizer.encode("".join(texts))
    return prompt


def _expand(patches: Patches, tokenizer: Tokenizer, prompt: Prompt) -> None:
    start, end = tokenizer.control_id(markers.MEDIA_START), tokenizer.control_id(markers.MEDIA_END)
    ids = prompt.ids
    if patches.kind == "image":
        prompt.media.append((len(ids) + 1, patches))
        ids += [start, *[tokenizer.control_id(markers.IMAGE)] * patches.tokens, end]
        return
    placeholder = tokenizer.control_id(markers.VIDEO)
    pairs, rest = divmod(patches.tokens, patches.tokens_per_frame)
    times = patches.timestamps
    if rest or (times is not None and len(times) != pairs):
        raise ConversationError(f"a film of {patches.tokens} tokens does not fit its {pairs} frame pairs and times")
    for pair in range(pairs):
        if times is not None:
            ids += tokenizer.encode(f"]<]{times[pair]:.1f} seconds[>[")
        if pair == 0:
            prompt.media.append((len(ids) + 1, patches))
        ids += [start, *[placeholder] * patches.tokens_per_frame, end]
