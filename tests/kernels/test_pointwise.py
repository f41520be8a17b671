"""Norm, rope, SwiGLU-OAI and router: worked numbers, and each against its formula written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3agent.kernels.norm import gemma_rms_norm
from m3agent.kernels.norm_rope import norm_rope, paired_rope_table
from m3agent.kernels.rope import apply_rope, rope_table
from m3agent.kernels.router import route
from m3agent.kernels.swiglu import swiglu_oai


def test_norm_worked_example() -> None:
    y = gemma_rms_norm(torch.tensor([1.0, 2, 3, 4]), torch.tensor([0, 0.5, -0.5, 1]))
    assert y.tolist() == pytest.approx([0.365148, 1.095445, 0.547723, 2.921187], abs=1e-6)


def test_norm_rounds_once_at_the_end() -> None:
    x, weight = torch.randn(5, 96, dtype=torch.bfloat16), torch.randn(96, dtype=torch.bfloat16)
    wide = gemma_rms_norm(x.float(), weight.float())
    assert gemma_rms_norm(x, weight).equal(wide.bfloat16())


def test_rope_worked_example() -> None:
    """Head of 8, rotary 4, theta 5e6, position 3."""
    cos, sin = rope_table(torch.tensor([3]), 4, 5e6)
    y = apply_rope(torch.arange(1.0, 9).view(1, 1, 8), cos, sin)
    assert y.flatten().tolist() == pytest.approx([-1.413352, 1.994632, -2.828857, 4.002680, 5, 6, 7, 8], abs=1e-5)


def test_rope_frequencies_of_the_release() -> None:
    cos, sin = rope_table(torch.tensor([1]), 64, 5e6)
    angles = torch.atan2(sin, cos)[0]
    assert angles[:3].tolist() == pytest.approx([1, 0.6175, 0.3813], abs=1e-4)
    assert float(angles[-1]) == pytest.approx(3.2387e-7, rel=1e-4)


@pytest.mark.parametrize("rotary", [2, 8, 16])
def test_fused_norm_and_rope_is_one_after_the_other(rotary: int) -> None:
    x, weight = torch.randn(7, 5, 16), torch.randn(5, 16) * 0.3
    positions = torch.tensor([0, 1, 2, 500, 501, 9, 70_000])
    expected = apply_rope(
        torch.stack([gemma_rms_norm(x[:, h], weight[h]) for h in range(5)], 1), *rope_table(positions, rotary, 1e4)
    )
    fused = norm_rope(x, 1 + weight, *paired_rope_table(positions, rotary, 1e4), 1e-6)
    assert (fused - expected).abs().max() < 2e-6


def test_fused_norm_and_rope_leaves_its_input() -> None:
    x = torch.randn(2, 3, 16)
    before = x.clone()
    norm_rope(x, torch.ones(3, 16), *paired_rope_table(torch.arange(2), 8, 1e4), 1e-6)
    assert x.equal(before)


@pytest.mark.parametrize(
    ("gate", "up", "value"),
    [(1, 1, 1.691592), (-1, 0.5, -0.231306), (8, 9, 55.999626), (-20, -9, 1.976e-13), (0, 3, 0)],
)
def test_swiglu_worked_examples(gate: float, up: float, value: float) -> None:
    found = swiglu_oai(torch.tensor([float(gate)]), torch.tensor([float(up)])).item()
    assert found == pytest.approx(value, rel=2e-4 if abs(value) < 1e-6 else 2e-6)


@settings(max_examples=200)
@given(st.floats(-30, 30, width=32), st.floats(-30, 30, width=32), st.sampled_from([1.5, 7.0]))
def test_swiglu_formula(gate: float, up: float, limit: float) -> None:
    g, u = min(gate, limit), max(-limit, min(up, limit))
    expected = (u + 1) * g / (1 + math.exp(-1.702 * g))
    found = swiglu_oai(torch.tensor([gate]), torch.tensor([up]), 1.702, limit).item()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_router_worked_example() -> None:
    weight = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 0]])
    chosen, weights = route(torch.tensor([[2.0, -1]]), weight, torch.tensor([0, 0, -1, 0.9]), 2)
    found = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    assert found == {3: pytest.approx(0.119203, abs=1e-6), 0: pytest.approx(0.880797, abs=1e-6)}


def test_router_computes_in_float32() -> None:
    x = torch.randn(20, 32, dtype=torch.bfloat16)
    weight, bias = torch.randn(8, 32), torch.randn(8)
    chosen, weights = route(x, weight, bias, 3)
    exact = torch.sigmoid(x.double() @ weight.double().T)
    assert chosen.sort(-1).values.equal((exact + bias).topk(3).indices.sort(-1).values)
    expected = exact.gather(-1, chosen) / exact.gather(-1, chosen).sum(-1, keepdim=True)
    assert weights.dtype is torch.float32
    assert (weights - expected).abs().max() < 1e-6
    assert weights.sum(-1).allclose(torch.ones(20))
