"""The names of pages: a hash over everything that decides what is in them.

A page's key covers the key of the page before it, so it stands for the model, its dtype, and every token and picture
from the first on. Two pages with one key hold the same keys and values, whoever computed them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from m3agent.runtime.features import MediaRun

FORMAT = "m3agent page 1"


class Pixels(NamedTuple):
    """What stands at a placeholder's place: one row of one vision grid of a picture or film."""

    id: int  # the placeholder token
    digest: str
    grid: int
    row: int


Identity = int | Pixels  # what decides a position's embedding


def root_key(fingerprint: str, dtype: str, page_tokens: int) -> bytes:
    """What the first page's key begins with. fingerprint: of the weights; dtype: of the pages."""
    return blake2b(f"{FORMAT}|{fingerprint}|{dtype}|{page_tokens}".encode(), digest_size=32).digest()


def page_key(before: bytes, identities: Sequence[Identity]) -> bytes:
    """The key of a full page behind the page `before`."""
    digest = blake2b(before, digest_size=32)
    digest.update(array("q", [-1 if isinstance(x, Pixels) else x for x in identities]).tobytes())
    for x in identities:
        if isinstance(x, Pixels):
            digest.update(f"{x.digest}|{x.grid}|{x.row};".encode())
    return digest.digest()


def identify(ids: Sequence[int], start: int, runs: Iterable[MediaRun]) -> list[Identity]:
    """The identities of tokens that stand at position `start` and on; runs: the pictures of the whole log."""
    found: list[Identity] = list(ids)
    end = start + len(found)
    for run in runs:
        for position in range(max(run.start, start), min(run.end, end)):
            row = run.row + position - run.start
            found[position - start] = Pixels(ids[position - start], run.patches.digest, run.grid, row)
    return found


def token_ids(identities: Iterable[Identity]) -> list[int]:
    return [x.id if isinstance(x, Pixels) else x for x in identities]
