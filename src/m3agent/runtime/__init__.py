"""The in-process engine: a model, its paged KV cache, one worker thread, and the token logs that use them.

`Runtime.open` → `runtime.sequence()` → `sequence.append(ids)` → `sequence.generate()`.
"""

from m3agent.runtime.defaults import Defaults
from m3agent.runtime.guide import Guide
from m3agent.runtime.request import Token
from m3agent.runtime.runtime import Capabilities, Runtime
from m3agent.runtime.sampling import Sampling
from m3agent.runtime.sequence import Sequence, TokenStream
from m3agent.runtime.usage import Stats, Usage

__all__ = [
    "Capabilities",
    "Defaults",
    "Guide",
    "Runtime",
    "Sampling",
    "Sequence",
    "Stats",
    "Token",
    "TokenStream",
    "Usage",
]
