"""What a session asks of a runtime, without a model: `DoubleRuntime` and its sequences keep a real one's rules."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel

from m3agent.errors import RuntimeClosed, SessionBusy

if TYPE_CHECKING:
    from m3agent.chat import ChatFormat, Tokenizer
    from m3agent.media.pixels import Patches, PixelSpec
    from m3agent.runtime import Defaults, Guide, Sampling, Token, Usage


@dataclass
class DoubleRuntime:
    """Subclasses say what comes next in `reply`, and may count waiting points in `point`."""

    tokenizer: Tokenizer
    chat_format: ChatFormat
    pixels: PixelSpec | None
    defaults: Defaults
    context_length: int
    vocabulary: int
    prompts: list[list[int]] = field(default_factory=list[list[int]])  # the log at the beginning of each turn
    closed: bool = False
    name: str = "test-double"

    def __post_init__(self) -> None:
        from m3agent.runtime.guide import Guides

        self.guides = Guides(self.tokenizer, self.vocabulary)

    def sequence(self) -> DoubleSequence:
        if self.closed:
            raise RuntimeClosed("the runtime is closed")
        return DoubleSequence(self)

    def reply(self, log: list[int], sampling: Sampling) -> list[int]:
        """The tokens of a turn after this log."""
        raise NotImplementedError

    async def point(self) -> None:
        """Every place where a real runtime waits."""
        await anyio.lowlevel.checkpoint()

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class DoubleSequence:
    """As `m3agent.runtime.Sequence`, with no cache behind it."""

    def __init__(self, runtime: DoubleRuntime, tokens: Iterable[int] = ()) -> None:
        self.runtime = runtime
        self.log = list(tokens)
        self.cached = 0  # tokens that a real one would have computed
        self.closed = False
        self.priority = 0
        self.name = ""
        self._stream: weakref.ref[DoubleStream] | None = None

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

    def generate(self, sampling: Sampling, guide: Guide | None = None) -> DoubleStream:
        """The guide is not asked: what is written is said."""
        return DoubleStream(self, sampling)

    def fork(self, tokens: int | None = None) -> Self:
        self.check_idle()
        other = type(self)(self.runtime, self.log[:tokens])
        other.cached = min(self.cached, len(other))
        return other

    def close(self) -> None:
        self.closed = True

    def check_idle(self) -> None:
        if self.closed or self.runtime.closed:
            raise RuntimeClosed("the sequence is closed")
        stream = self._stream and self._stream()
        if stream is not None and not stream.left:
            raise SessionBusy("a stream of this sequence is open")

    def open(self, stream: DoubleStream) -> None:
        self.check_idle()
        self._stream = weakref.ref(stream)


class DoubleStream:
    """As `m3agent.runtime.TokenStream`."""

    def __init__(self, sequence: DoubleSequence, sampling: Sampling) -> None:
        self.sequence, self.sampling = sequence, sampling
        self.left = True
        self.finish: str | None = None
        self._ids: list[int] = []
        self._taken = self._prompt = self._reused = 0

    async def __aenter__(self) -> Self:
        await self.sequence.runtime.point()
        self.sequence.open(self)
        self.left = False
        log = self.sequence.tokens
        self.sequence.runtime.prompts.append(log)
        self._prompt, self._reused = len(log), self.sequence.cached
        self._ids = self.sequence.runtime.reply(log, self.sampling)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
        self.left = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        from m3agent.runtime import Token

        await self.sequence.runtime.point()
        if self.sequence.closed or self.sequence.runtime.closed:
            raise RuntimeClosed("the sequence was closed")
        limit, ended = self.sampling.max_tokens, self._taken == len(self._ids)
        if ended or (limit is not None and self._taken >= limit):
            self.finish = "stop" if ended and self._ids[-1:] == [self._end] else "length"
            raise StopAsyncIteration
        token = self._ids[self._taken]
        self._taken += 1
        self.sequence.log.append(token)
        self.sequence.cached = len(self.sequence.log) - 1
        return Token(token, 0.0)

    @property
    def usage(self) -> Usage:
        from m3agent.runtime import Usage

        return Usage(
            prompt_tokens=self._prompt,
            reused_tokens=self._reused,
            computed_tokens=self._prompt - self._reused,
            output_tokens=self._taken,
            first_tokens=min(self._taken, 1),
        )

    @property
    def _end(self) -> int:
        from m3agent.chat import markers

        return self.sequence.runtime.tokenizer.control_id(markers.END)


def parts_of(model: str | Path | None) -> dict[str, object]:
    """What a runtime has besides its weights, from a checkpoint's small files; None is the embedded m3-nano."""
    from m3agent.runtime.runtime import small_files

    files = small_files(model)
    return {
        "tokenizer": files.tokenizer,
        "chat_format": files.chat_format,
        "pixels": files.pixels,
        "defaults": files.defaults,
        "context_length": files.config.text.max_position_embeddings,
        "vocabulary": files.config.text.vocab_size,
    }
