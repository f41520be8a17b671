"""The paged KV cache: per layer one tensor of pages for keys, one for values, one for index keys.

A page holds `block_size` tokens, so a page is exactly one block of the sparse attention. Which pages belong to which
sequence is the caller's business; here are only the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from m3agent.model.config import M3Config


@dataclass(frozen=True)
class KVPages:
    """k[layer], v[layer]: [pages, block, kv_heads, head_dim]; ik[layer]: [pages, block, index_dim], None if dense."""

    k: list[Tensor]
    v: list[Tensor]
    ik: list[Tensor | None]

    @classmethod
    def allocate(
        cls,
        config: M3Config,
        pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVPages:
        """Zeroed pages for all layers."""
        t = config.text
        shape = (pages, t.block_size, t.num_key_value_heads, t.head_dim)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            k=[zeros(*shape) for _ in t.sparse_layers],
            v=[zeros(*shape) for _ in t.sparse_layers],
            ik=[zeros(pages, t.block_size, t.index_dim) if sparse else None for sparse in t.sparse_layers],
        )

    @staticmethod
    def bytes_per_page(config: M3Config, dtype: torch.dtype) -> int:
        """What one page takes over all layers, in bytes."""
        t = config.text
        numbers = 2 * t.num_hidden_layers * t.num_key_value_heads * t.head_dim + sum(t.sparse_layers) * t.index_dim
        return numbers * t.block_size * dtype.itemsize

    @cached_property
    def slots(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The same memory token by token, for each layer: k, v, ik, each [pages · block, ...]."""
        return [
            (k.flatten(0, 1), v.flatten(0, 1), None if ik is None else ik.flatten(0, 1))
            for k, v, ik in zip(self.k, self.v, self.ik, strict=True)
        ]

    @property
    def pages(self) -> int:
        return self.k[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.k[0].shape[1]

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer, index keys included (a fork's partly filled last page)."""
        for tensors in (self.k, self.v, self.ik):
            for tensor in tensors:
                if tensor is not None:
                    tensor[target].copy_(tensor[source])
