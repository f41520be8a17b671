"""The small Triton kernels against their torch meanings: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch

from m3agent.kernels.norm import gemma_rms_norm
from m3agent.kernels.norm_rope import norm_rope, paired_rope_table
from m3agent.kernels.router import route
from m3agent.kernels.swiglu import swiglu_oai
from tests.kernels.triton_device import DEVICE, poisoned

pytest.importorskip("triton")

from m3agent.kernels import best_triton, norm_rope_triton, norm_triton, router_triton, swiglu_triton

# The interpreter cuts to bfloat16 where a GPU rounds.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
EPS = 1e-6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within one rounding of half precision: what is summed in another order may fall on the other side."""
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=2**-7 * wanted.abs().max().item() * 0.01)


@pytest.mark.parametrize(("n", "width"), [(1, 64), (3, 96), (5, 320)])
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(n: int, width: int, adds: bool) -> None:
    x, delta = normal(n, width).to(DTYPE), normal(n, width, seed=1).to(DTYPE)
    weight = normal(width, seed=2) * 0.1
    with poisoned():
        total, out = norm_triton.add_norm(x, delta if adds else None, 1.0 + weight, EPS)
    assert torch.equal(total, x + delta if adds else x)
    near(out, gemma_rms_norm(total, weight, EPS))


@pytest.mark.parametrize("index", [0, 2])
def test_heads_to_pages(index: int) -> None:
    """Tokens of two sequences go to shuffled pages; what is not theirs stays as it was."""
    heads = norm_rope_triton.Heads(q=4, kv=2, index=index, width=16)
    normed = heads.q + heads.kv + (index + 1 if index else 0)
    rows, gain = normal(7, heads.row).to(DTYPE), 1 + 0.1 * normal(normed, heads.width, seed=1)
    positions = torch.tensor([5, 6, 7, 8, 0, 1, 2], device=DEVICE)
    slots = torch.tensor([13, 14, 15, 32, 48, 49, 50], device=DEVICE)
    cos, sin = paired_rope_table(torch.arange(64, device=DEVICE), 8, 10_000.0)
    pages = [torch.full((4, 16, heads.kv, heads.width), 7.0, dtype=DTYPE, device=DEVICE) for _ in "kv"]
    ik_pages = torch.full((4, 16, heads.width), 7.0, dtype=DTYPE, device=DEVICE)
    with poisoned():
        q, iq = norm_rope_triton.heads_to_pages(
            rows, gain, cos, sin, positions, slots, heads, *pages, ik_pages if index else None, EPS
        )
    turned = norm_rope(rows[:, : normed * 16].view(7, normed, 16), gain, cos[positions], sin[positions], EPS)
    near(q, turned[:, :4])
    near(pages[0].flatten(0, 1)[slots], turned[:, 4:6])
    assert torch.equal(pages[1].flatten(0, 1)[slots], rows[:, normed * 16 :].view(7, 2, 16))
    untouched = torch.ones(64, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    assert all((page.flatten(0, 1)[untouched] == 7).all() for page in pages)
    if index:
        assert iq is not None
        near(iq, turned[:, 6:8])
        near(ik_pages.flatten(0, 1)[slots], turned[:, 8])
        assert (ik_pages.flatten(0, 1)[untouched] == 7).all()
    else:
        assert iq is None
        assert (ik_pages == 7).all()


@pytest.mark.parametrize(("n", "experts", "count"), [(1, 8, 2), (9, 128, 4), (4, 20, 3)])
def test_choose(n: int, experts: int, count: int) -> None:
    x, weight, bias = normal(n, 32), normal(experts, 32, seed=1) * 0.3, normal(experts, seed=2) * 0.2
    with poisoned():
        chosen, weights = router_triton.choose(x @ weight.T, bias, count, 2.0)
    wanted, shares = route(x, weight, bias, count)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, shares * 2.0, rtol=1e-5, atol=1e-6)


def test_choose_takes_the_lower_of_equals() -> None:
    chosen, _ = router_triton.choose(torch.zeros(2, 8, device=DEVICE), torch.zeros(8, device=DEVICE), 3, 1.0)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("n", "width"), [(1, 32), (3, 1100)])
def test_swiglu_rows(n: int, width: int) -> None:
    rows = (normal(n, 2 * width) * 6).to(DTYPE)
    with poisoned():
        found = swiglu_triton.swiglu_rows(rows, 1.702, 7.0)
    near(found, swiglu_oai(*rows.float().chunk(2, -1)))


@pytest.mark.parametrize("width", [7, 1024, 70_001])
def test_best_of_rows(width: int) -> None:
    rows = normal(4, width).bfloat16().float()
    rows[1] = 2.0
    rows[2, width // 2 :] = float("-inf")
    with poisoned():
        found = best_triton.best_of_rows(rows)
    assert found[:, 2].tolist() == rows.argmax(-1).tolist()
    assert torch.equal(found[:, 1], rows.amax(-1))
    torch.testing.assert_close(found[:, 0], rows.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_are_told(bad: float) -> None:
    rows = normal(2, 3000)
    rows[0, 2000] = bad
    assert best_triton.best_of_rows(rows)[:, 0].isfinite().tolist() == [False, True]
