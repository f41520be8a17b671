"""One page on the disk: a safetensors file with a checksum for each part, so that parts can be read and checked alone.

The file is safetensors as its specification has it (8 bytes little-endian header length, a JSON header, then the data),
and any reader of the format opens it. It is read here without a library because parts are wanted without the rest, and
because nothing may be mapped into memory that another process could cut short. The header has a checksum too: a flipped
bit in a shape, a name or the parent's key is found like one in the data.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "m3agent page 1"
HEADER_LIMIT = 1 << 20  # bytes
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WRONG = (LookupError, TypeError, ValueError, RuntimeError, OverflowError)  # what a senseless header comes to

Read = Callable[[int, int], bytearray]  # offset, size; may give less


class DamagedPage(Exception):
    """A file that is not what was written under this key."""


def page_bytes(key: bytes, parent: bytes, payload: Mapping[str, Tensor]) -> bytes:
    """The file's content, parts in the payload's order. payload: CPU tensors by name."""
    header: dict[str, Any] = {}
    data = [_raw(part) for part in payload.values()]
    end = 0
    for (name, part), raw in zip(payload.items(), data, strict=True):
        header[name] = {"dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [end, end + raw.nbytes]}
        end += raw.nbytes
    sums = {name: zlib.crc32(raw) for name, raw in zip(payload, data, strict=True)}
    meta = {"version": VERSION, "key": key.hex(), "parent": parent.hex(), "checksums": json.dumps(sums)}
    header["__metadata__"] = {**meta, "header": _seal({**header, "__metadata__": meta})}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


def read_page(path: Path, key: bytes, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The named parts of a page, or all of them; nothing else is read.

    Raises DamagedPage for a file that is cut short, changed, of another key or version, OSError as the system does.
    """
    with path.open("rb", buffering=0) as file:
        return _parts_of(_reader(file.fileno()), os.fstat(file.fileno()).st_size, key, names)


def parse_page(data: bytes, key: bytes) -> dict[str, Tensor]:
    """All parts of a page from its file's content. Raises DamagedPage."""
    return _parts_of(lambda offset, size: bytearray(data[offset : offset + size]), len(data), key, None)


def read_parent(path: Path) -> tuple[bytes, bytes]:
    """Key and parent key, for whoever finds the file without an index. Raises DamagedPage, OSError."""
    with path.open("rb", buffering=0) as file:
        header, begin = _header(_reader(file.fileno()))
        size = os.fstat(file.fileno()).st_size
    try:
        meta = header.pop("__metadata__")
        if size < begin + max(int(entry["data_offsets"][1]) for entry in header.values()):
            raise DamagedPage("cut short")
        return bytes.fromhex(meta["key"]), bytes.fromhex(meta["parent"])
    except WRONG as error:
        raise DamagedPage(f"a header that makes no sense: {error!r}") from None


def _parts_of(read: Read, size: int, key: bytes, names: Iterable[str] | None) -> dict[str, Tensor]:
    header, begin = _header(read)
    meta = header.pop("__metadata__")
    try:
        if meta["key"] != key.hex():
            raise DamagedPage("another page")
        sums = json.loads(meta["checksums"])
        wanted = header if names is None else names
        return {name: _part(read, size - begin, header[name], begin, int(sums[name])) for name in wanted}
    except WRONG as error:
        raise DamagedPage(f"a header that makes no sense: {error!r}") from None


def _header(read: Read) -> tuple[dict[str, Any], int]:
    """The JSON header, whole and of this version, and where the data begin."""
    size = int.from_bytes(read(0, 8), "little")
    if not 2 <= size <= HEADER_LIMIT:
        raise DamagedPage(f"a header of {size} bytes")
    raw = read(8, size)
    if len(raw) != size:
        raise DamagedPage("a header that is cut short")
    try:
        header = json.loads(raw)
        meta = header["__metadata__"]
        if meta["version"] != VERSION:
            raise DamagedPage("another version")
        seal = meta.pop("header")
        if seal != _seal(header):
            raise DamagedPage("a header with a wrong checksum")
    except (*WRONG, AttributeError, RecursionError) as error:
        raise DamagedPage(f"a header that makes no sense: {error!r}") from None
    return header, 8 + size


def _seal(header: Mapping[str, Any]) -> str:
    """The checksum of a header, of all that is in it but itself, in hexadecimal."""
    return f"{zlib.crc32(json.dumps(header, sort_keys=True).encode()):08x}"


def _part(read: Read, room: int, entry: Mapping[str, Any], begin: int, expected: int) -> Tensor:
    """room: bytes of data in the file. Nothing is allocated before it is known to be in there."""
    first, last = (int(offset) for offset in entry["data_offsets"])
    dtype, shape = DTYPES[entry["dtype"]], [int(side) for side in entry["shape"]]
    count = 1
    for side in shape:
        count *= side
    if not 0 <= first <= last <= room or min(shape) < 1 or count * dtype.itemsize != last - first:
        raise DamagedPage("a part that is not where the header says")
    data = read(begin + first, last - first)
    if len(data) != last - first or zlib.crc32(data) != expected:
        raise DamagedPage("a part with a wrong checksum")
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _raw(part: Tensor) -> memoryview:
    return part.contiguous().flatten().view(torch.uint8).numpy().data


def _reader(file: int) -> Read:
    def read(offset: int, size: int) -> bytearray:
        data = bytearray(min(size, max(os.fstat(file).st_size - offset, 0)))
        done = 0
        while done < len(data):  # the system may give less at a time
            got = os.preadv(file, [memoryview(data)[done:]], offset + done)
            if got == 0:
                break
            done += got
        return data[:done] if done < len(data) else data

    return read
