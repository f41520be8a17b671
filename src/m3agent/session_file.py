"""A session in one file: its messages, its tokens, and, where that was asked for, its pages.

A zip archive of `session.json` and `pages/KEY.safetensors`. It is written beside and then moved, so that a name always
stands for a whole file. Whoever reads it with the same weights goes on with the very tokens, and with the pages as far
as they are there; with other weights, instructions or thinking, with the messages alone.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Sequence as Items
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from pydantic import BaseModel, ValidationError

from m3agent.chat.messages import Thinking
from m3agent.content import Message
from m3agent.errors import ConversationError, SessionFileError
from m3agent.history import History

if TYPE_CHECKING:
    from m3agent.media.pixels import Patches
    from m3agent.runtime import Sequence
    from m3agent.runtime.kv.layout import Payload

FORMAT = "m3agent session 1"
_HEAD = "session.json"


class Saved(BaseModel):
    """session.json. starts: where the messages begin in the tokens, see `TokenLog`."""

    format: str
    fingerprint: str | None
    instructions: str | None
    thinking: Thinking
    messages: list[Message]
    tokens: list[int]
    starts: list[int] | None


async def write(path: Path, history: History, pages: bool) -> None:
    """Raises SessionFileError, RuntimeClosed; what was at the path stays then."""
    saved = Saved(
        format=FORMAT,
        fingerprint=getattr(history.runtime, "fingerprint", None),
        instructions=history.instructions,
        thinking=history.thinking,
        messages=history.messages,
        tokens=history.tokens,
        starts=None if history.log is None else history.log.known_starts,
    )
    try:
        file, name = await anyio.to_thread.run_sync(_beside, path)
        try:
            with zipfile.ZipFile(file, "w") as archive:
                await anyio.to_thread.run_sync(lambda: archive.writestr(_HEAD, saved.model_dump_json()))
                sequence = _sequence(history) if pages else None
                if sequence is not None:
                    await _write_pages(archive, sequence)
            await anyio.to_thread.run_sync(_move, file, name, path)
        finally:
            file.close()
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise SessionFileError(f"{path}: the session cannot be saved ({error.strerror or error})") from error


async def read(path: Path) -> Saved:
    """Raises SessionFileError for what is no saved session, or of another version."""

    def load() -> Saved:
        with zipfile.ZipFile(path) as archive:
            saved = Saved.model_validate_json(archive.read(_HEAD))
        if saved.format != FORMAT:
            raise SessionFileError(f"{path}: this is {saved.format!r}, and {FORMAT!r} can be read")
        return saved

    try:
        return await anyio.to_thread.run_sync(load)
    except OSError as error:
        raise SessionFileError(f"{path}: the session cannot be read ({error.strerror or error})") from error
    except (KeyError, ValidationError, ValueError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise SessionFileError(f"{path}: this is no saved session, or a damaged one ({error})") from error


async def take_up(history: History, saved: Saved, path: Path) -> None:
    """Go on with the saved tokens, where they are those of this runtime and this agent. The history has the messages,
    and no log yet. Raises RuntimeClosed.
    """
    from m3agent.runtime import Runtime

    runtime = history.runtime
    if not isinstance(runtime, Runtime) or not saved.tokens or runtime.fingerprint != saved.fingerprint:
        return
    if (history.instructions, history.thinking) != (saved.instructions, saved.thinking):
        return
    if saved.starts is not None and len(saved.starts) != len(history.logged):
        return
    sequence = runtime.sequence()
    try:
        pictures = await anyio.to_thread.run_sync(history.pictures)
        sequence.append(saved.tokens, _places(saved.tokens, pictures, runtime.placeholders))
    except (ConversationError, ValueError):
        sequence.close()  # tokens that do not go with the messages: these are what counts
        return
    history.take_up_log(sequence, saved.starts)
    await sequence.adopt(lambda key: _read_page(path, key))


async def _write_pages(archive: zipfile.ZipFile, sequence: Sequence) -> None:
    from m3agent.runtime.kv.page_file import page_bytes

    for number in count():
        page = await sequence.page(number)
        if page is None:
            return
        key, payload = page
        await anyio.to_thread.run_sync(
            lambda key=key, payload=payload: archive.writestr(_page(key), page_bytes(key, b"", payload))
        )


def _sequence(history: History) -> Sequence | None:
    """Where there are pages."""
    from m3agent.runtime import Sequence

    found: Any = None if history.log is None else history.log.sequence
    return found if isinstance(found, Sequence) else None


def _places(tokens: Items[int], pictures: Items[Patches], marks: dict[str, int]) -> list[tuple[int, Patches]]:
    """Where each picture or film begins: they take the placeholder tokens in turn. Raises ConversationError."""
    places = [place for place, token in enumerate(tokens) if token in marks.values()]
    found: list[tuple[int, Patches]] = []
    taken = 0
    for patches in pictures:
        if taken >= len(places):
            raise ConversationError("there are more pictures than the tokens have places for")
        found.append((places[taken], patches))
        taken += patches.tokens
    return found


def _page(key: bytes) -> str:
    return f"pages/{key.hex()}.safetensors"


def _read_page(path: Path, key: bytes) -> Payload | None:
    """None where it is not in the file, or damaged: then it is computed."""
    from m3agent.runtime.kv.page_file import DamagedPage, parse_page

    try:
        with zipfile.ZipFile(path) as archive:
            return parse_page(archive.read(_page(key)), key)
    except (OSError, KeyError, ValueError, DamagedPage, zipfile.BadZipFile, EOFError, NotImplementedError):
        return None


def _beside(path: Path) -> tuple[Any, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False)  # noqa: SIM115
    return file, file.name


def _move(file: Any, name: str, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.replace(name, path)
