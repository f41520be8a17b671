"""Pages in 8 bits, for the tiers below the device: keys and values as int8 with a scale for each token and head.

Index keys stay as they are: they decide which blocks are read at all, and are the smaller part of a page.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from m3agent.runtime.kv.layout import INDEX_KEYS, Payload

SCALE = ".scale"
_UP = 1 + 2**-8  # a scale that is rounded to bfloat16 does not fall below the one that is needed


def pack(payload: Payload) -> dict[str, Tensor]:
    """Each part but the index keys as int8 [..., d], and beside it "NAME.scale", bfloat16 [...].

    A number comes back to within half its scale, which is 1/127 of the largest one of its d neighbours.
    """
    packed: dict[str, Tensor] = {}
    for name, part in payload.items():
        if name == INDEX_KEYS:
            packed[name] = part
            continue
        numbers = part.float()
        scale = (numbers.abs().amax(-1) / 127 * _UP).bfloat16()
        steps = numbers / scale.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        packed[name] = steps.round_().clamp_(-127, 127).to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def unpack(payload: Payload, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The page again, in the device's dtype; one that was not packed is returned as it is. Raises ValueError where
    codes and scales do not belong together.
    """
    if not any(name.endswith(SCALE) for name in payload):
        return payload
    page: dict[str, Tensor] = {}
    for name, part in payload.items():
        if name.endswith(SCALE):
            continue
        scale = payload.get(name + SCALE)
        if scale is None:
            page[name] = part
        elif scale.shape != part.shape[:-1]:
            raise ValueError(f"the page's part {name!r} and its scales have different shapes")
        else:
            page[name] = (part.float() * scale.float().unsqueeze(-1)).to(dtype)
    return page
