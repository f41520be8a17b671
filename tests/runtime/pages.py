"""Pages of a store for tests: what is in one follows from its number, so any process can tell a wrong one."""

import hashlib

import torch
from torch import Tensor

from m3agent.runtime.kv.store import DiskStore

Payload = dict[str, Tensor]


def key(number: int) -> bytes:
    return hashlib.blake2b(f"page {number}".encode(), digest_size=32).digest()


def payload(number: int, size: int = 300) -> Payload:
    """About 4 * size bytes."""
    noise = torch.Generator().manual_seed(number)
    full = torch.randn(2, size // 2, generator=noise)
    return {"ik": torch.randn(1, size // 3, generator=noise).bfloat16(), "full": full, "kv.1": full[:, :10] + 1}


def put(store: DiskStore, number: int, parent: int = -1, cost: float = 1.0) -> bool:
    return store.put(key(number), key(parent), payload(number), cost)


def check(found: Payload | None, number: int) -> None:
    assert found is not None, f"page {number} is missing"
    expected = payload(number)
    assert list(found) == list(expected)
    for name, part in expected.items():
        assert found[name].dtype is part.dtype
        assert torch.equal(found[name], part), f"page {number} is wrong"
