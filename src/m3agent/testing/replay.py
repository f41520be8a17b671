"""`record` keeps what a real model generated; `replay` says it again, exactly, without the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from m3agent.errors import M3Error
from m3agent.testing.double import DoubleRuntime, parts_of

if TYPE_CHECKING:
    from m3agent.chat import Tokenizer
    from m3agent.media.pixels import Patches
    from m3agent.runtime import Guide, Runtime, Sampling, Token, TokenStream

FORMAT = 1


class ReplayMismatch(M3Error):
    """A run asks for something that was not recorded; the message shows where it first differs."""


@dataclass
class Generation:
    """One turn: prompt is the whole log before it, media a digest of the pictures in it, tokens what came of it."""

    prompt: list[int]
    media: str
    tokens: list[int] = field(default_factory=list[int])


class Recorder:
    """Made by `record`: the runtime itself, with sequences that note what they generate."""

    def __init__(self, runtime: Runtime, path: Path, model: str | None) -> None:
        self._runtime, self._path, self._model = runtime, path, model
        self.generations: list[Generation] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def sequence(self) -> _Noted:
        return _Noted(self._runtime.sequence(), self.generations, _Pictures())

    def save(self) -> None:
        found = {"format": FORMAT, "model": self._model, "generations": [asdict(each) for each in self.generations]}
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(found) + "\n", encoding="utf-8")
        part.replace(self._path)

    async def __aenter__(self) -> Recorder:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.save()


class _Noted:
    """A sequence whose generations are noted."""

    def __init__(self, sequence: Any, notes: list[Generation], media: _Pictures) -> None:
        self._sequence, self._notes, self._media = sequence, notes, media

    @property
    def priority(self) -> int:
        return self._sequence.priority

    @priority.setter
    def priority(self, value: int) -> None:
        self._sequence.priority = value

    @property
    def name(self) -> str:
        return self._sequence.name

    @name.setter
    def name(self, value: str) -> None:
        self._sequence.name = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequence, name)

    def __len__(self) -> int:
        return len(self._sequence)

    def append(self, ids: Iterable[int], media: Sequence[tuple[int, Patches]] = ()) -> None:
        before = len(self)
        self._sequence.append(ids, media)
        self._media.append(before, media)

    def fork(self, tokens: int | None = None) -> _Noted:
        return _Noted(self._sequence.fork(tokens), self._notes, self._media.first(tokens))

    def generate(self, sampling: Sampling | None = None, guide: Guide | None = None) -> _NotedStream:
        note = Generation(self._sequence.tokens, self._media.digest)
        return _NotedStream(self._sequence.generate(sampling, guide), note, self._notes)


class _NotedStream:
    def __init__(self, stream: TokenStream, note: Generation, notes: list[Generation]) -> None:
        self._stream, self._note, self._notes = stream, note, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _NotedStream:
        await self._stream.__aenter__()
        self._notes.append(self._note)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)

    def __aiter__(self) -> _NotedStream:
        return self

    async def __anext__(self) -> Token:
        token = await self._stream.__anext__()
        self._note.tokens.append(token.id)
        return token


@dataclass
class ReplayRuntime(DoubleRuntime):
    """Made by `replay`."""

    generations: list[Generation] = field(default_factory=list[Generation])

    def sequence(self) -> Any:
        return _Digesting(super().sequence(), _Pictures())

    def reply(self, log: list[int], sampling: Sampling) -> list[int]:
        for place, generation in enumerate(self.generations):
            if generation.prompt == log:
                del self.generations[place]  # the same prompt may come again, and was answered anew
                return generation.tokens
        raise ReplayMismatch(_difference(log, self.generations, self.tokenizer))


class _Digesting:
    """A double's sequence that knows its pictures, as the recorded one did."""

    def __init__(self, sequence: Any, media: _Pictures) -> None:
        self._sequence, self._media = sequence, media

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequence, name)

    def __len__(self) -> int:
        return len(self._sequence)

    def append(self, ids: Iterable[int], media: Sequence[tuple[int, Patches]] = ()) -> None:
        before = len(self)
        self._sequence.append(ids, media)
        self._media.append(before, media)

    def fork(self, tokens: int | None = None) -> _Digesting:
        return _Digesting(self._sequence.fork(tokens), self._media.first(tokens))

    def generate(self, sampling: Sampling, guide: Guide | None = None) -> Any:
        runtime, log = self._sequence.runtime, self._sequence.tokens
        same = [each for each in runtime.generations if each.prompt == log]
        if same and all(each.media != self._media.digest for each in same):
            raise ReplayMismatch("the text is as it was recorded, but a picture or film in it is another one")
        return self._sequence.generate(sampling, guide)


class _Pictures:
    """The pictures and films of a log, as the hash of all up to each of them and the token where that one begins."""

    def __init__(self, hashes: Iterable[tuple[int, Any]] = ()) -> None:
        self._hashes = list(hashes)

    @property
    def digest(self) -> str:
        return (self._hashes[-1][1] if self._hashes else hashlib.sha256()).hexdigest()

    def append(self, before: int, media: Iterable[tuple[int, Patches]]) -> None:
        """Pictures of a prompt that follows `before` tokens."""
        for place, patches in media:
            whole = self._hashes[-1][1].copy() if self._hashes else hashlib.sha256()
            whole.update(patches.pixels.numpy().tobytes())
            self._hashes.append((before + place, whole))

    def first(self, tokens: int | None) -> _Pictures:
        """Those of the first tokens of the log, of all by default."""
        return _Pictures(each for each in self._hashes if tokens is None or each[0] < tokens)


def record(runtime: Runtime, path: str | Path, *, model: str | Path | None = None) -> Recorder:
    """Wrap an open runtime: `async with record(runtime, "run.json") as runtime:` writes the file when the block ends.

    model: what the runtime was opened with, as `replay` needs the tokenizer and chat format of the same checkpoint.
    """
    return Recorder(runtime, Path(path), None if model is None else str(model))


def replay(path: str | Path) -> ReplayRuntime:
    """A runtime that answers each prompt with the tokens that were recorded for it, in the order of the recording.

    Raises ReplayMismatch, here for a file that is no recording, and in a run for a prompt that was not recorded.
    """
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ReplayMismatch(f"{path} has format {found['format']}; this version reads {FORMAT}: record it again")
        generations = [Generation(**each) for each in found["generations"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReplayMismatch(f"{path} is no recording ({error}); make one with m3agent.testing.record") from error
    parts: dict[str, Any] = parts_of(found["model"])
    return ReplayRuntime(**parts, generations=generations)


def _difference(log: list[int], generations: list[Generation], tokenizer: Tokenizer) -> str:
    if not generations:
        return "the recording has no more generations; record the run again"

    def common(prompt: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(log, prompt, strict=False)) if a != b), min(len(log), len(prompt))
        )

    nearest = max(generations, key=lambda each: common(each.prompt))
    place = common(nearest.prompt)
    before = tokenizer.decode(log[max(0, place - 20) : place])
    now, then = (tokenizer.decode(ids[place : place + 20]) for ids in (log, nearest.prompt))
    return (
        f"this prompt was not recorded. It agrees with the nearest one for {place} tokens, up to {before!r}; then it "
        f"has {now!r}, where {then!r} was recorded. Record the run again if the change is meant"
    )
