"""Pages in 8 bits: how near they come back, and that they are never taken for exact ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m3agent.model import M3Model
from m3agent.runtime import Runtime
from m3agent.runtime.kv.eight_bit import SCALE, pack, unpack
from m3agent.runtime.runtime import Opening
from tests.runtime.test_engine import prompt
from tests.runtime.tiny import uncached_logits

Open = Callable[..., Opening]
NUMBER = st.floats(-1e4, 1e4, width=32)


@given(st.lists(st.lists(NUMBER, min_size=4, max_size=4), min_size=1, max_size=6))
def test_a_number_comes_back_to_within_half_its_scale(rows: list[list[float]]) -> None:
    part = torch.tensor(rows)
    packed = pack({"kv.1": part, "ik": part})
    assert packed["kv.1"].dtype is torch.int8
    page = unpack(packed, torch.float32)
    assert torch.equal(page["ik"], part)
    scale = part.abs().amax(-1, keepdim=True) / 127
    assert ((page["kv.1"] - part).abs() <= 0.51 * scale * 1.01 + 1e-37).all()


def test_zeros_and_what_was_not_packed() -> None:
    zeros = {"full": torch.zeros(2, 3, 4)}
    assert torch.equal(unpack(pack(zeros), torch.float32)["full"], zeros["full"])
    assert unpack(zeros, torch.float32) is zeros
    with pytest.raises(ValueError, match="different shapes"):
        unpack({"full": torch.zeros(2, 4, dtype=torch.int8), "full" + SCALE: torch.zeros(3)}, torch.float32)


@pytest.mark.anyio
async def test_pages_from_the_disk_are_near_and_keys_apart(checkpoint: Path, model: M3Model, tmp_path: Path) -> None:
    tokens = prompt(200)

    async def logits(eight_bit: bool) -> tuple[torch.Tensor, int]:
        async with Runtime.open(
            checkpoint, cache_tokens=1024, disk_cache=tmp_path, eight_bit_tiers=eight_bit
        ) as runtime:
            sequence = runtime.sequence()
            sequence.append(tokens)
            found = await sequence.logits()
            assert runtime.engine.cache.tiers is not None
            runtime.engine.cache.tiers.flush()
            return found, runtime.stats().promoted_tokens

    exact = uncached_logits(model, tokens)[-1]
    first, promoted = await logits(True)
    assert promoted == 0
    torch.testing.assert_close(first, exact, rtol=0, atol=1e-4)
    again, promoted = await logits(True)
    assert promoted == 192
    assert 0 < (again - exact).abs().max() < 0.1 * exact.abs().max()
    other, promoted = await logits(False)  # of other pages, though the tokens and weights are the same
    assert promoted == 0
    torch.testing.assert_close(other, exact, rtol=0, atol=1e-4)
    assert (await logits(False))[1] == 192
