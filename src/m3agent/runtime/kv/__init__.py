"""The KV cache as pages: who owns which page (`PagePool`) and which pages a sequence has (`BlockTable`).

The tensors themselves are `m3agent.model.pages.KVPages`; here are only page numbers and reference counts.
"""

from m3agent.runtime.kv.pool import PagePool
from m3agent.runtime.kv.table import BlockTable

__all__ = ["BlockTable", "PagePool"]
