"""The KV cache as pages: who owns which (`PagePool`), a sequence's own (`BlockTable`), by content (`PrefixIndex`).

`KVCache` puts the three together. The tensors are `m3agent.model.pages.KVPages`; here are numbers, counts and keys.
"""

from m3agent.runtime.kv.cache import KVCache
from m3agent.runtime.kv.pool import PagePool
from m3agent.runtime.kv.table import BlockTable

__all__ = ["BlockTable", "KVCache", "PagePool"]
