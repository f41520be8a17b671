"""One page as named tensors on the CPU, in the order in which a resumed sequence needs them.

Index keys come first and full layers second: with these every layer can say which blocks of keys and values it wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from m3agent.model.pages import KVPages

INDEX_KEYS, FULL = "ik", "full"

Payload = Mapping[str, Tensor]


def sparse_part(layer: int) -> str:
    """The name of a sparse layer's keys and values."""
    return f"kv.{layer}"


def export_page(pages: KVPages, page: int) -> dict[str, Tensor]:
    """What a page holds, by one copy: "ik" [sparse layers, block, index_dim] (where there are any), "full"
    [other layers, 2, block, kv_heads, head_dim], and for each sparse layer "kv.LAYER" [2, block, kv_heads, head_dim].
    """
    parts = {name: [tensor[page] for tensor in tensors] for name, tensors in _parts(pages)}
    flat = torch.cat([row.reshape(-1) for rows in parts.values() for row in rows]).cpu()
    payload: dict[str, Tensor] = {}
    begin = 0
    for name, rows in parts.items():
        size = sum(row.numel() for row in rows)
        shape = rows[0].shape if name == INDEX_KEYS else (2, *rows[0].shape)
        lead = () if name.startswith("kv.") else (-1,)
        payload[name] = flat[begin : begin + size].view(*lead, *shape)
        begin += size
    return payload


def import_page(pages: KVPages, page: int, payload: Payload, names: Iterable[str] | None = None) -> None:
    """Write a payload's parts, or only the named ones, into a page.

    Raises ValueError for a part that is missing or has another shape or dtype; the page may then hold anything.
    """
    wanted = None if names is None else set(names)
    for name, tensors in _parts(pages):
        if wanted is not None and name not in wanted:
            continue
        shape = tensors[0].shape[1:]
        part = payload.get(name)
        if part is None or part.dtype is not tensors[0].dtype or part.numel() != len(tensors) * shape.numel():
            raise ValueError(f"the page's part {name!r} is missing or not of this model")
        rows = part.to(tensors[0].device).reshape(len(tensors), *shape)
        for tensor, row in zip(tensors, rows, strict=True):
            tensor[page].copy_(row)


def part_names(pages: KVPages) -> list[str]:
    """All parts in their order."""
    return [name for name, _ in _parts(pages)]


def _parts(pages: KVPages) -> Iterator[tuple[str, list[Tensor]]]:
    """The tensors [pages, ...] whose rows make up each part."""
    sparse = [ik for ik in pages.ik if ik is not None]
    if sparse:
        yield INDEX_KEYS, sparse
    full = [x for k, v, ik in zip(pages.k, pages.v, pages.ik, strict=True) if ik is None for x in (k, v)]
    if full:
        yield FULL, full
    for layer, (k, v, ik) in enumerate(zip(pages.k, pages.v, pages.ik, strict=True)):
        if ik is not None:
            yield sparse_part(layer), [k, v]
