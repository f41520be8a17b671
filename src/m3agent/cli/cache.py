"""`m3agent cache`: what the KV cache on the disk holds, and making it smaller; also while others use it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3agent.cli.errors import plain_errors
from m3agent.errors import CacheError

if TYPE_CHECKING:  # it brings torch, which --help has no use for
    from m3agent.runtime.kv.store import DiskStore

cache = typer.Typer(help="The KV cache on the disk.", no_args_is_help=True)
Folder = Annotated[
    Path | None,
    typer.Option(help="The cache's folder; without it the user's own.", metavar="FOLDER", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@cache.command("ls")
def list_pages(folder: Folder = None, as_json: Json = False) -> None:
    """List the pages, the ones that would be evicted first at the beginning."""
    with plain_errors():
        pages = _opened(folder).pages()
        rows = [{"key": page.key.hex(), "size": page.size, "pinned": page.pinned} for page in pages]
        if as_json:
            print(json.dumps(rows, indent=2))
            return
        for page in pages:
            print(f"{page.key.hex()}  {_size(page.size):>10}{'  pinned' if page.pinned else ''}")


@cache.command()
def stat(folder: Folder = None, as_json: Json = False) -> None:
    """Tell how much is stored and who pinned it."""
    with plain_errors():
        found = asdict(_opened(folder).stat())
        told = {name: found[name] for name in ("folder", "pages", "size", "pinned", "names")}
        if as_json:
            print(json.dumps(told, indent=2))
            return
        pinned = f", {_size(found['pinned'])} of it pinned" if found["pinned"] else ""
        print(f"{found['folder']}: {_pages(found['pages'])}, {_size(found['size'])}{pinned}")
        for name in found["names"]:
            print(f"pinned by {name}")


@cache.command()
def verify(folder: Folder = None, as_json: Json = False) -> None:
    """Read every page; remove and tell what is damaged (exit code 1)."""
    with plain_errors():
        told = _opened(folder).verify()
        print(json.dumps(told, indent=2) if as_json else "\n".join(told) or "Every page is whole.")
        if told:
            raise typer.Exit(1)


@cache.command()
def gc(
    limit: Annotated[str, typer.Option(help="Bytes to stay below, as 500M or 20G.", metavar="SIZE")],
    folder: Folder = None,
) -> None:
    """Evict pages until the store is a tenth below the limit."""
    with plain_errors():
        store = _opened(folder, _bytes(limit))
        gone = store.gc()
        found = store.stat()
        if found.last_failure is not None:
            raise CacheError(found.last_failure)
        print(f"{_pages(gone)} evicted; {_pages(found.pages)}, {_size(found.size)} left")


@cache.command()
def clear(folder: Folder = None, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Remove every page and pin. What is asked for again is computed again."""
    with plain_errors():
        store = _opened(folder)
        found = store.stat()
        question = f"Remove {_pages(found.pages)}, {_size(found.size)}, from {store.folder}?"
        if not yes and not typer.confirm(question):
            raise typer.Exit(1)
        store.clear()
        print(f"{_pages(found.pages)} removed")


def _opened(folder: Path | None, limit: int | None = None) -> DiskStore:
    """The store, if there is one: none is made. Raises CacheError."""
    from m3agent.runtime.kv.store import DiskStore, cache_folder

    folder = cache_folder() if folder is None else folder
    if not (folder / "pages").is_dir():
        raise CacheError(f"there is no cache in {folder}")
    return DiskStore(folder, limit)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise CacheError(f"{text!r} is no size; write bytes, or a number with K, M, G or T")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _pages(count: int) -> str:
    return f"{count:,} page{'' if count == 1 else 's'}"
