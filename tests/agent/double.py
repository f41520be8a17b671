"""A runtime whose model is a script: it says what a test wrote, token by token, and keeps the rules of a `Sequence`.

`Fuse` cuts a run at its n-th waiting point, so that a test can try all of them.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel

from m3agent.chat import ChatFormat, ReplyParser, Tokenizer
from m3agent.media.pixels import Patches, PixelSpec
from m3agent.runtime import Defaults, Guide, Sampling, Token, Usage
from m3agent.runtime.guide import Guides
from tests.runtime.tiny import write_tokenizer

NS = "]<]minimax[>["
END = "[e~["
_CONTROL = re.compile(r"(\[e~\[|\]~b\]|\]<\]minimax\[>\[|</?tool_call>|</?mm:think>)")


def call(tool: str, /, **arguments: str) -> str:
    """One call as the model writes it, values verbatim."""
    inside = "".join(f"{NS}<{key}>{value}{NS}</{key}>" for key, value in arguments.items())
    return f'{NS}<invoke name="{tool}">{inside}{NS}</invoke>\n'


def block(*calls: str) -> str:
    return f"{NS}<tool_call>\n{''.join(calls)}{NS}</tool_call>"


def make_tokenizer(folder: Path) -> Tokenizer:
    write_tokenizer(folder)
    return Tokenizer.load(folder)


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Markers become control tokens, the rest one token a byte."""
    return [
        token
        for piece in _CONTROL.split(text)
        for token in ([tokenizer.control[piece]] if piece in tokenizer.control else tokenizer.encode(piece))
    ]


class Fuse:
    """Counts waiting points; at number `at` it cancels `scope` there."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0
        self.scope: anyio.CancelScope | None = None
        self.blown = False

    async def point(self) -> None:
        self.count += 1
        if self.count == self.at and self.scope is not None:
            self.blown = True
            self.scope.cancel()
        await anyio.lowlevel.checkpoint()


@dataclass
class ScriptedRuntime:
    tokenizer: Tokenizer
    chat_format: ChatFormat = field(init=False)
    replies: list[str] = field(default_factory=list[str])  # one a turn, across all sequences
    context_length: int = 1_000_000
    vocabulary: int = 320
    pixels: PixelSpec | None = field(default_factory=PixelSpec)
    defaults: Defaults = field(default_factory=lambda: Defaults(thinking_mode="disabled"))
    fuse: Fuse = field(default_factory=Fuse)
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    media: list[Patches] = field(default_factory=list[Patches])  # every picture that was appended, in order
    samplings: list[Sampling] = field(default_factory=list[Sampling])
    closed_sequences: int = 0
    name: str = "scripted"

    def __post_init__(self) -> None:
        self.chat_format = ChatFormat(self.tokenizer)
        self.guides = Guides(self.tokenizer, self.tokenizer.size)

    def says(self, *replies: str) -> Self:
        """Add turns; each is ended by the end token, unless it ends in "…" (a turn that only a limit ends)."""
        self.replies += replies
        return self

    def sequence(self) -> ScriptedSequence:
        return ScriptedSequence(self)


class ScriptedSequence:
    def __init__(self, runtime: ScriptedRuntime, tokens: Iterable[int] = ()) -> None:
        self.runtime = runtime
        self.log = list(tokens)
        self._stream: Callable[[], ScriptedStream | None] = lambda: None

    @property
    def tokens(self) -> list[int]:
        return list(self.log)

    def __len__(self) -> int:
        return len(self.log)

    @property
    def last(self) -> int | None:
        return self.log[-1] if self.log else None

    def append(self, ids: Iterable[int], media: Iterable[tuple[int, Patches]] = ()) -> None:
        self.check_idle()
        self.log += list(ids)
        self.runtime.media += [patches for _, patches in media]

    def check_idle(self) -> None:
        stream = self._stream()
        assert stream is None or stream.left, "a stream is open"

    def open(self, stream: ScriptedStream) -> None:
        self.check_idle()
        self._stream = weakref.ref(stream)

    def generate(self, sampling: Sampling, guide: Guide | None = None) -> ScriptedStream:
        """The script says what it says, the guide is not asked."""
        return ScriptedStream(self, sampling)

    def fork(self, tokens: int | None = None) -> ScriptedSequence:
        return ScriptedSequence(self.runtime, self.log[:tokens])

    def close(self) -> None:
        self.runtime.closed_sequences += 1


class ScriptedStream:
    def __init__(self, sequence: ScriptedSequence, sampling: Sampling) -> None:
        self.sequence, self.sampling = sequence, sampling
        self.runtime = sequence.runtime
        self.left = True
        self.finish: str | None = None
        self.ids: list[int] = []
        self.taken = 0

    async def __aenter__(self) -> Self:
        await self.runtime.fuse.point()
        self.sequence.open(self)
        self.left = False
        self.runtime.prompts.append(self.sequence.tokens)
        self.runtime.samplings.append(self.sampling)
        reply = self.runtime.replies.pop(0)
        self.ids = ids_of(reply if reply.endswith("…") else reply + END, self.runtime.tokenizer)
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
        self.left = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        await self.runtime.fuse.point()
        limit = self.sampling.max_tokens
        if self.taken == len(self.ids) or (limit is not None and self.taken >= limit):
            self.finish = "stop" if self.taken and self.ids[self.taken - 1] == self.ids[-1] else "length"
            raise StopAsyncIteration
        token = self.ids[self.taken]
        self.taken += 1
        self.sequence.log.append(token)
        return Token(token, 0.0)

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.sequence.log) - self.taken, output_tokens=self.taken, first_tokens=1)


# What a log must look like --------------------------------------------------------------------------------------------


@dataclass
class Block:
    role: str
    body: str


def read_log(runtime: ScriptedRuntime | Any, tokens: list[int]) -> list[Block]:
    """The messages of a token log, read from its control tokens alone; fails where the format is broken."""
    tokenizer = runtime.tokenizer
    begin, end = tokenizer.control["]~b]"], tokenizer.control[END]
    assert tokens[0] == tokenizer.control["]~!b["]
    blocks: list[Block] = []
    position = 1
    while position < len(tokens):
        assert tokens[position] == begin, f"a message begins with {tokenizer.decode(tokens[position:][:20])!r}"
        stop = next((i for i in range(position, len(tokens)) if tokens[i] == end), None)
        role, _, body = tokenizer.decode(tokens[position + 1 : stop]).partition("\n")
        blocks.append(Block(role, body))
        if stop is None:
            break
        if stop + 1 < len(tokens):
            assert tokenizer.decode(tokens[stop + 1 : stop + 2]) == "\n"
        position = stop + 2
    return blocks


def check_log(runtime: ScriptedRuntime | Any, session: Any) -> list[Block]:
    """The log is a valid conversation: roles in order, exactly one response for every call, damaged ones included."""
    blocks = read_log(runtime, session.tokens)
    assert [b.role for b in blocks[:2]] == ["system", "developer"]
    definitions = [tool.definition for tool in session.tools]
    for before, after in pairwise(blocks[2:]):
        calls = 0
        if before.role == "ai":
            parser = ReplyParser(definitions, "disabled")
            events = parser.feed(before.body.removeprefix("</mm:think>")) + parser.finish()
            calls = sum(type(event).__name__ in ("CallFinished", "CallDamaged") for event in events)
        responses = after.body.count("<response>") if after.role == "tool" else 0
        assert responses == calls, (before, after)
        assert after.role in ({"ai": ("tool",) if calls else ("user",)}.get(before.role, ("ai", "user")))
    assert all(
        len(message.results) == len(previous.calls)
        for previous, message in zip(session.messages, session.messages[1:], strict=False)
    )
    return blocks
