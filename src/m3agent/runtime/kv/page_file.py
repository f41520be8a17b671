"""One page on the disk: a safetensors file with a checksum for each part, so that parts can be read and checked alone.

The file is safetensors as its specification has it (8 bytes little-endian header length, a JSON header, then the data),
and any reader of the format opens it. It is read here without a library because parts are wanted without the rest, and
because nothing may be mapped into memory that another process could cut short.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

VERSION = "m3agent page 1"
HEADER_LIMIT = 1 << 20  # bytes
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}


class DamagedPage(Exception):
    """A file that is not what was written under this key."""


def page_bytes(key: bytes, parent: bytes, payload: Mapping[str, Tensor]) -> bytes:
    """The file's content. payload: contiguous CPU tensors by name."""
    sums = {name: checksum(part) for name, part in payload.items()}
    metadata = {"version": VERSION, "key": key.hex(), "parent": parent.hex(), "checksums": json.dumps(sums)}
    return save(dict(payload), metadata)


def read_page(path: Path, key: bytes, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The named parts of a page, or all of them; nothing else is read.

    Raises DamagedPage for a file that is cut short, changed, of another key or version, OSError as the system does.
    """
    with path.open("rb", buffering=0) as file:
        return _parts_of(file.fileno(), key, names)


def parse_page(data: bytes, key: bytes) -> dict[str, Tensor]:
    """All parts of a page from its file's content. Raises DamagedPage."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        return _parts_of(file.fileno(), key, None)


def read_parent(path: Path) -> tuple[bytes, bytes]:
    """Key and parent key, for whoever finds the file without an index. Raises DamagedPage, OSError."""
    with path.open("rb", buffering=0) as file:
        header, _ = _header(file.fileno())
    try:
        meta = header["__metadata__"]
        if meta["version"] != VERSION:
            raise DamagedPage("another version")
        return bytes.fromhex(meta["key"]), bytes.fromhex(meta["parent"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedPage(f"a header that makes no sense: {error!r}") from None


def _parts_of(file: int, key: bytes, names: Iterable[str] | None) -> dict[str, Tensor]:
    header, begin = _header(file)
    meta = header.pop("__metadata__", None)
    try:
        if meta["version"] != VERSION or meta["key"] != key.hex():
            raise DamagedPage("another page or version")
        sums = json.loads(meta["checksums"])
        wanted = header if names is None else names
        return {name: _part(file, header[name], begin, int(sums[name])) for name in wanted}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedPage(f"a header that makes no sense: {error!r}") from None


def checksum(part: Tensor) -> int:
    return zlib.crc32(part.contiguous().flatten().view(torch.uint8).numpy().data)


def _header(file: int) -> tuple[dict[str, Any], int]:
    """The JSON header and where the data begin."""
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 2 <= size <= HEADER_LIMIT:
        raise DamagedPage(f"a header of {size} bytes")
    raw = os.pread(file, size, 8)
    try:
        header = json.loads(raw)
    except ValueError:
        raise DamagedPage("a header that is no JSON") from None
    if len(raw) != size or not isinstance(header, dict):
        raise DamagedPage("a header that is cut short")
    return header, 8 + size


def _part(file: int, entry: dict[str, Any], begin: int, expected: int) -> Tensor:
    first, last = (int(offset) for offset in entry["data_offsets"])
    dtype, shape = DTYPES[entry["dtype"]], [int(side) for side in entry["shape"]]
    end = os.fstat(file).st_size
    count = 1
    for side in shape:
        count *= side
    if not 0 <= first <= last or begin + last > end or count * dtype.itemsize != last - first or min(shape) < 1:
        raise DamagedPage("a part that is not where the header says")
    data = bytearray(last - first)
    got = os.preadv(file, [data], begin + first)
    if got != last - first or zlib.crc32(data) != expected:
        raise DamagedPage("a part with a wrong checksum")
    return torch.frombuffer(data, dtype=dtype).view(shape)
