"""Matrix products in every layout and library, and experts however many tokens there are."""

from __future__ import annotations

import pytest
import torch

from m3agent.kernels.experts import gated_mlp, routed_experts
from m3agent.kernels.linear import FBGEMM, MANY_ROWS, HalfMatrix, for_few_rows, input_major, linear
from m3agent.kernels.swiglu import swiglu_oai

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, MANY_ROWS - 1, MANY_ROWS, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(rows: int, dtype: torch.dtype, biased: bool) -> None:
    """float16 weights meet float32 rows; bfloat16 ones meet their like."""
    x = torch.randn(rows, 48)
    weight = input_major((40, 48), dtype, CPU).copy_(torch.randn(40, 48))
    bias = torch.randn(40) if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if dtype is torch.bfloat16:
        out, tolerance = linear(x.bfloat16(), weight, None if bias is None else bias.bfloat16()), 0.2
    else:
        out, tolerance = linear(x, weight, bias), 2e-2 if dtype is torch.float16 and rows == 1 else 2e-5
        assert out.dtype is torch.float32
    assert (out.double() - exact).abs().max() < tolerance


@pytest.mark.parametrize(("scale", "gain"), [(1e6, 1e-3), (1e3, 1e3)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_row_beyond_float16_is_multiplied_in_float32(scale: float, gain: float, biased: bool) -> None:
    """Models in bfloat16 have a few such activations; they must not become infinite."""
    x = torch.randn(1, 48) * scale
    weight = (torch.randn(40, 48) * gain).half()
    bias = torch.randn(40) if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (linear(x, weight, bias).double() - exact).abs().max() < exact.abs().max() * 1e-5


@pytest.mark.skipif(not FBGEMM, reason="this torch has no FBGEMM")
@pytest.mark.parametrize("rows", [1, 2, MANY_ROWS - 1, MANY_ROWS])
@pytest.mark.parametrize("biased", [True, False])
def test_packed_half_is_the_same_weight_in_float32(rows: int, biased: bool) -> None:
    """Neither the smallest nor the largest halves are rounded, nor the rows, however large."""
    weight = (torch.randn(40, 48) * torch.logspace(-8, 4, 48)).clamp(-65504, 65504).half()
    weight[0, :3] = torch.tensor([2**-24, 65504.0, -65504.0])
    x = torch.randn(rows, 48) * 1e6
    bias = torch.randn(40) * 1e6 if biased else None
    packed = for_few_rows(weight)
    assert isinstance(packed, HalfMatrix)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = x.double().abs() @ weight.double().abs().T
    assert ((linear(x, packed, bias).double() - exact).abs() / scale).max() < 1e-6
    one = torch.zeros(rows, 48)
    one[:, 0] = 1.0
    assert linear(one, packed).equal(weight[:, 0].float().expand(rows, -1))


def test_only_halves_on_the_cpu_are_packed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(4, 3, dtype=dtype)
        assert for_few_rows(weight) is weight


def test_input_major_is_a_weight_like_any_other() -> None:
    weight = input_major((3, 40, 48), torch.float32, CPU)
    assert weight.shape == (3, 40, 48)
    assert weight[1].T.is_contiguous()
    assert input_major((3, 40, 48), torch.float16, CPU).is_contiguous()


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("count", [1, 3])
def test_experts(tokens: int, count: int) -> None:
    x, gate_up, down = torch.randn(tokens, 16), torch.randn(5, 24, 16) / 4, torch.randn(5, 16, 12) / 4
    chosen = torch.stack([torch.randperm(5)[:count] for _ in range(tokens)])
    weights = torch.rand(tokens, count)
    expected = torch.zeros(tokens, 16)
    for i in range(tokens):
        for weight, expert in zip(weights[i], chosen[i].tolist(), strict=True):
            inner = gate_up[expert] @ x[i]
            expected[i] += weight * (down[expert] @ swiglu_oai(inner[:12], inner[12:], 1.702, 1.0))
    found = routed_experts(x, chosen, weights, gate_up, down, 1.702, 1.0)
    assert (found - expected).abs().max() < 1e-5


def test_experts_nobody_chose_are_not_touched() -> None:
    gate_up, down = torch.full((4, 8, 6), float("nan")), torch.full((4, 6, 4), float("nan"))
    gate_up[2], down[2] = torch.randn(8, 6), torch.randn(6, 4)
    for tokens in (1, 5):
        x, chosen = torch.randn(tokens, 6), torch.full((tokens, 1), 2)
        found = routed_experts(x, chosen, torch.ones(tokens, 1), gate_up, down, 1.702, 7.0)
        assert (found - gated_mlp(x, gate_up[2], down[2], 1.702, 7.0)).abs().max() < 1e-6
