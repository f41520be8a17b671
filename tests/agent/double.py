"""A runtime whose model is a script: it says what a test wrote, token by token, and keeps the rules of a `Sequence`.

`Fuse` cuts a run at its n-th waiting point, so that a test can try all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel

from m3agent.chat import ChatFormat, ReplyParser, Tokenizer
from m3agent.media.pixels import Patches, PixelSpec
from m3agent.runtime import Defaults, Sampling
from m3agent.testing.double import DoubleRuntime, DoubleSequence
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


class ScriptedRuntime(DoubleRuntime):
    """The double of `m3agent.testing` for turns that are written out, markers included, with all that tests look at."""

    def __init__(self, tokenizer: Tokenizer, *, context_length: int = 1_000_000, fuse: Fuse | None = None) -> None:
        defaults = Defaults(thinking_mode="disabled")
        super().__init__(tokenizer, ChatFormat(tokenizer), PixelSpec(), defaults, context_length, 320, name="scripted")
        self.replies: list[str] = []  # one a turn, across all sequences
        self.fuse = fuse or Fuse()
        self.media: list[Patches] = []  # every picture that was appended, in order
        self.samplings: list[Sampling] = []
        self.closed_sequences = 0

    def says(self, *replies: str) -> Self:
        """Add turns; each is ended by the end token, unless it ends in "…" (a turn that only a limit ends)."""
        self.replies += replies
        return self

    def sequence(self) -> ScriptedSequence:
        return ScriptedSequence(self)

    def reply(self, log: list[int], sampling: Sampling) -> list[int]:
        self.samplings.append(sampling)
        reply = self.replies.pop(0)
        return ids_of(reply if reply.endswith("…") else reply + END, self.tokenizer)

    async def point(self) -> None:
        await self.fuse.point()


class ScriptedSequence(DoubleSequence):
    runtime: ScriptedRuntime

    def append(self, ids: Iterable[int], media: Iterable[tuple[int, Patches]] = ()) -> None:
        super().append(ids)
        self.runtime.media += [patches for _, patches in media]

    def close(self) -> None:
        super().close()
        self.runtime.closed_sequences += 1


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
