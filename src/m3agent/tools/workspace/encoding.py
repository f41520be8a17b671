"""The bytes of a text file ↔ its text, without losing one: what is decoded here encodes to the same bytes again."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

# UTF-32 first: its little-endian mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NAMES = {"utf-8": "UTF-8", "cp1252": "Windows-1252", "latin-1": "Latin-1"}
_CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")


@dataclass(frozen=True)
class Text:
    """`text` without byte order mark, and how it stands in the file."""

    text: str
    codec: str = "utf-8"
    errors: str = "strict"
    mark: bytes = b""

    @property
    def encoding(self) -> str:
        """The encoding's name for people, e.g. "UTF-16-LE"."""
        damaged = ", with bytes that are not" if self.errors != "strict" else ""
        return _NAMES.get(self.codec, self.codec.upper()) + damaged

    def encode(self, text: str) -> bytes:
        """The file's bytes with `text` in it. Raises UnicodeEncodeError for a character that the encoding lacks."""
        return self.mark + text.encode(self.codec, self.errors)

    def shown(self, text: str) -> str:
        """`text` for the model: bytes that are no text become U+FFFD."""
        return text if self.errors == "strict" else re.sub("[\udc80-\udcff]", "\ufffd", text)


def decode(data: bytes) -> Text | None:
    """By byte order mark; else UTF-8 where valid or nearly so; else Windows-1252 or Latin-1. None for binary data."""
    for mark, codec in _MARKS:
        if data.startswith(mark) and (text := _exactly(data, codec, mark)):
            return text
    if b"\x00" in data:
        return None
    if text := _exactly(data, "utf-8"):
        return text
    if _CONTROLS.search(data):
        return None
    # A stray byte or two in a UTF-8 file must not turn all its other characters into pairs of wrong ones.
    escaped = data.decode("utf-8", "surrogateescape")
    stray = len(re.findall("[\udc80-\udcff]", escaped))
    if sum(character > "\x7f" for character in escaped) > 2 * stray:
        return Text(escaped, "utf-8", "surrogateescape")
    return _exactly(data, "cp1252") or _exactly(data, "latin-1")


def _exactly(data: bytes, codec: str, mark: bytes = b"") -> Text | None:
    try:
        text = Text(data[len(mark) :].decode(codec), codec, mark=mark)
        return text if text.encode(text.text) == data else None
    except UnicodeDecodeError:
        return None
