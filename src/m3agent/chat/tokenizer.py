"""Text to ids and back. Every added token of tokenizer.json is a control token here, and no text can spell one."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from m3agent.errors import CheckpointError
from m3agent.json_file import read_text

# Long texts are rarely met twice, and would keep their memory.
_CACHED_TEXT = 8192
_PIECE = 1 << 16  # characters that `exceeds` encodes at a time


class Tokenizer:
    """A byte-level BPE tokenizer read from a tokenizer.json. Safe to share between threads.

    `control` maps the spelling of every added token (the 61 of MiniMax-M3) to its id, wherever the ids lie.
    """

    def __init__(self, tokenizer_json: str) -> None:
        definition: dict[str, Any] = json.loads(tokenizer_json)
        if definition["model"].get("type") != "BPE" or "ByteLevel" not in json.dumps(definition.get("decoder")):
            raise CheckpointError("not a byte-level BPE, the only kind of tokenizer that MiniMax-M3 uses")
        self.control: dict[str, int] = {token["content"]: token["id"] for token in definition["added_tokens"]}
        for text, number in self.control.items():
            if not isinstance(text, str) or not isinstance(number, int) or number < 0:
                raise CheckpointError(f"the added token {text!r} has no text or no id")
        self._control_text = {number: text for text, number in self.control.items()}
        self._vocabulary: dict[int, str] = {number: token for token, number in definition["model"]["vocab"].items()}
        self._plain = _without_control(definition, self._control_text)
        self._token_bytes = lru_cache(maxsize=None)(self._bytes_of)
        self._encode_cached = lru_cache(maxsize=4096)(self._encode)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads `folder`/tokenizer.json. Raises CheckpointError if it is missing or no byte-level BPE."""
        file = Path(folder) / "tokenizer.json"
        source = read_text(file)
        if source is None:
            raise CheckpointError(f"{file} is missing: a checkpoint needs its tokenizer.json")
        try:
            return cls(source)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None
        except Exception as error:  # a wrong type anywhere, and the tokenizers library raises Exception itself
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error!r}") from error

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return 1 + max(max(self._vocabulary), max(self._control_text, default=0))

    def control_id(self, text: str) -> int:
        """The id of the control token spelled `text`. Raises CheckpointError if this tokenizer has none."""
        number = self.control.get(text)
        if number is None:
            raise CheckpointError(f"the tokenizer has no control token {text!r}, which the chat format needs")
        return number

    def is_control(self, number: int) -> bool:
        return number in self._control_text

    def bytes_of(self, number: int) -> bytes:
        """The bytes of an ordinary token; none for an id that the vocabulary lacks."""
        return self._token_bytes(number) if number in self._vocabulary else b""

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; never a control id. Lone surrogates, which no encoding can hold, become U+FFFD."""
        return list(self._encode_cached(text) if len(text) <= _CACHED_TEXT else self._encode(text))

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether `text` has more than `tokens` tokens by far; of an absurdly long one only the beginning is encoded.

        False says little: the text may still have up to twice as many and a few, which `encode` finds out.
        """
        if len(text) <= tokens:
            return False
        count = 0
        for start in range(0, len(text), _PIECE):
            # A cut may cost a token or two beyond what the whole text has, so only twice the number is certain.
            count += len(self._encode(text[start : start + _PIECE]))
            if count > 2 * tokens:
                return True
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens by their spelling; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self)
        pieces = [text for number in ids for text, _ in detokenizer.push(number)]
        return "".join([*pieces, *(text for text, _ in detokenizer.finish())])

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        except TypeError:  # what the library raises for a string with lone surrogates
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self._plain.encode(clean, add_special_tokens=False).ids
        # The plain tokenizer knows no control token; an id of one means that tokenizer.json is not what it seems.
        if not self._control_text.keys().isdisjoint(ids):
            raise CheckpointError("the tokenizer made a control token out of ordinary text: tokenizer.json is unsafe")
        return tuple(ids)

    def _bytes_of(self, number: int) -> bytes:
        token = self._vocabulary.get(number)
        if token is None or not _BYTE_OF.keys() >= set(token):
            raise CheckpointError(f"token id {number} is not in the tokenizer's byte-level vocabulary of {self.size}")
        return bytes(_BYTE_OF[character] for character in token)


class Detokenizer:
    """Ids to text as they come. Bytes of an unfinished character are held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> list[tuple[str, bool]]:
        """The (text, is_control) pieces that this id completes: none, one, or cut-off text before a control token."""
        control = self._tokenizer._control_text.get(number)
        if control is not None:
            return [*self.finish(), (control, True)]
        text = self._decoder.decode(self._tokenizer._token_bytes(number))
        return [(text, False)] if text else []

    def finish(self) -> list[tuple[str, bool]]:
        """What is held back: an unfinished character as U+FFFD. The detokenizer can be used again afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return [(text, False)] if text else []


def _without_control(definition: dict[str, Any], control: dict[int, str]) -> tokenizers.Tokenizer:
    """The same tokenizer with every trace of the control tokens removed: no text has a way to them.

    Some files list control tokens in the vocabulary too, where a merge or a whole-word lookup could reach them.
    """
    model = dict(definition["model"])
    removed = {token for token, number in model["vocab"].items() if number in control}
    if removed:
        model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in removed}
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if removed.isdisjoint((*pair, "".join(pair)))]
    if model.get("unk_token") not in model["vocab"]:
        model["unk_token"] = None
    plain = {**definition, "model": model, "added_tokens": []}
    plain.update(post_processor=None, truncation=None, padding=None)
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, the others are moved above U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
