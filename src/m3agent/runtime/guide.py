"""Guided decoding: which tokens may come next, so that calls are well-formed and an answer has its type.

`Guide` is what the engine asks. `TurnGuide` is the one of an assistant's turn: free text costs it next to nothing; from
the token that opens a block of calls on, or from the first token of a typed answer, a grammar masks the logits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from m3agent.chat import Detokenizer, Tokenizer, markers
from m3agent.chat.grammar import answer_grammar, calls_grammar
from m3agent.chat.messages import Thinking
from m3agent.errors import GuideError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHED = 64  # grammars


class Guide(Protocol):
    """Asked by the engine's worker alone, in turn: `allowed`, then `accept` for the token that was chosen."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """Which token ids may come next, [vocabulary]; None for any. Raises GuideError."""
        ...

    def accept(self, token: int) -> None:
        """The token has been chosen. Raises GuideError for one that was not allowed."""
        ...


class Guides:
    """The guides of one runtime: compiles grammars once and keeps them. May be used from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._llguidance: LLTokenizer | None = None
        self._matchers: dict[str, LLMatcher] = {}

    def turn(
        self, tools: Sequence[Mapping[str, Any]], thinking: Thinking, answer: Mapping[str, Any] | None = None
    ) -> TurnGuide | None:
        """The guide of one turn, None when there is nothing to hold it to. answer: the JSON schema of a typed answer.

        Compiling takes some milliseconds the first time for the same tools and schema. Raises GuideError for a schema
        that has no grammar.
        """
        if not tools and answer is None:
            return None
        key = _key(tools, answer)
        with self._lock:
            matcher = self._matchers.pop(key, None) or self._compile(tools, answer)
            self._matchers[key] = matcher  # the one used last is the last to go
            if len(self._matchers) > _CACHED:
                del self._matchers[next(iter(self._matchers))]
            return TurnGuide(matcher.deep_copy(), self._tokenizer, self._vocabulary, thinking, answer is not None)

    def compiled(self, tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any] | None = None) -> bool:
        """Whether `turn` has nothing to compile, and is a matter of microseconds."""
        return (not tools and answer is None) or _key(tools, answer) in self._matchers

    def _compile(self, tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any] | None) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper  # 10 ms, and only where something is guided

        if self._llguidance is None:
            # No slices: they speed up JSON strings in large vocabularies, which elements have not.
            self._llguidance = LLTokenizer(TokenizerWrapper(_Bytes(self._tokenizer, self._vocabulary)))
        grammar = (
            calls_grammar(tools, self._tokenizer) if answer is None else answer_grammar(answer, tools, self._tokenizer)
        )
        matcher = LLMatcher(self._llguidance, LLMatcher.grammar_from_lark(grammar.lark), log_level=0)
        if matcher.is_error():
            raise GuideError(f"no grammar for these schemas: {matcher.get_error()}")
        return matcher


def _key(tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any] | None) -> str:
    return json.dumps([tools, answer])


class TurnGuide:
    """Follows the turn as the parser reads it: thinking is free, and so is text before a block of calls."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: Tokenizer, vocabulary: int, thinking: Thinking, typed: bool
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(tokenizer)
        self._ns, self._end = tokenizer.control_id(markers.NS), tokenizer.control_id(markers.END)
        self._think = tokenizer.control_id(markers.THINK)
        self._typed = typed
        self._thinking = thinking == "enabled"
        self._thought = thinking != "adaptive"  # thinking can begin no more
        self._guided = typed and not self._thinking
        self._first = True
        self._over = False
        self._tail = ""  # of the free text, for markers that are spelled out

    def allowed(self) -> NDArray[np.bool_] | None:
        if not self._guided or self._over:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(np.bool_)
        if self._first and not self._thought:
            allowed[self._think] = True
        if not allowed.any():
            raise GuideError(f"the grammar allows no token: {self._matcher.get_error() or 'it has ended'}")
        return allowed

    def accept(self, token: int) -> None:
        first, self._first = self._first, False
        if self._over:
            return
        if not self._guided:
            self._free(token)
        elif first and token == self._think and not self._thought:
            self._thinking, self._guided, self._tail = True, False, ""
        elif token == self._end and self._matcher.is_accepting():
            self._over = True
        elif not self._matcher.consume_token(token):
            raise GuideError(f"token {token} does not fit the grammar: {self._matcher.get_error()}")

    def _free(self, token: int) -> None:
        """Thinking, or text before a block of calls; watches for what ends it."""
        if token == self._end:
            self._over = True
        elif token == self._ns and not self._thinking:
            self._guided = True
            if not self._matcher.consume_token(token):
                raise GuideError(f"no calls may be made: {self._matcher.get_error()}")
        else:
            # Thinking markers count however they are written, so the text is looked at, not the ids.
            text = "".join(piece for piece, _ in self._detokenizer.push(token))
            self._tail = self._tail[-16:] + text
            if self._thinking and markers.THINK_END in self._tail:
                self._thinking, self._thought, self._tail = False, True, ""
                self._guided = self._typed
            elif not self._thinking and not self._thought and markers.THINK in self._tail:
                self._thinking, self._tail = True, ""


class _Bytes:
    """The vocabulary as llguidance asks for it: the bytes of every id, and which are control tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.eos_token_id = tokenizer.control_id(markers.END)
        self.bos_token_id = None
        spelled = {number: text.encode() for text, number in tokenizer.control.items()}
        self.tokens = [spelled.get(number) or tokenizer.bytes_of(number) for number in range(vocabulary)]
        self.special_token_ids = sorted(spelled)
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
