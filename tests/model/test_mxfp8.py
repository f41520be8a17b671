"""The MXFP8 quantiser against its definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3agent.model.mxfp8 import dequantize_mxfp8, quantize_mxfp8

E4M3 = sorted({float(x) for x in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()})
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def definition(block: list[float]) -> tuple[int, list[float]]:
    """Scale byte and values of one block of 32, in exact arithmetic: smallest power of two with |w| / 2^p <= 448."""
    peak = max(max(abs(x) for x in block), 2.0**-126)
    power = math.frexp(peak)[1] - 10
    while math.ldexp(448.0, power) < peak:
        power += 1
    power = min(max(power, -127), 127)
    values = []
    for x in block:
        scaled = math.ldexp(abs(x), -power)  # exact in float64
        nearest = min(E4M3, key=lambda v: (abs(v - scaled), round(v / _step(v)) % 2))
        values.append(math.copysign(math.ldexp(nearest, power), x))
    return power + 127, values


def _step(value: float) -> float:
    """The spacing of e4m3 at a value, so that value / step is its integer significand (even ones win ties)."""
    return 2.0 ** (max(math.frexp(value)[1] - 1, -6) - 3) if value else 2.0**-9


@settings(max_examples=60)
@given(st.lists(floats, min_size=64, max_size=64), st.integers(-30, 30))
def test_bytes_and_values_follow_the_definition(numbers: list[float], shift: int) -> None:
    weight = torch.tensor(numbers, dtype=torch.float64).ldexp(torch.tensor(shift)).float().nan_to_num().view(2, 32)
    values, scales = quantize_mxfp8(weight)
    assert values.dtype is torch.float8_e4m3fn
    assert scales.dtype is torch.uint8
    assert scales.shape == (2, 1)
    restored = dequantize_mxfp8(values, scales, torch.float64)
    for row in range(2):
        scale, expected = definition([float(x) for x in weight[row].double()])
        assert scales[row, 0] == scale
        in_float32 = torch.tensor(expected, dtype=torch.float64).float().double()  # below 2^-149 float32 rounds
        assert restored[row].tolist() == in_float32.tolist()


@settings(max_examples=100)
@given(st.lists(st.floats(-4, 4, width=32), min_size=32, max_size=32))
def test_error_and_idempotence(numbers: list[float]) -> None:
    weight = torch.tensor(numbers).view(1, 32)
    values, scales = quantize_mxfp8(weight)
    restored = dequantize_mxfp8(values, scales)
    half_step = max(float(weight.abs().max()) / 16, 2.0**-137)  # of a 3-bit fraction at the peak; of the least scale
    assert (restored - weight).abs().max() <= half_step
    again, same = quantize_mxfp8(restored)
    assert dequantize_mxfp8(again, same).equal(restored)


def test_worked_example_of_the_release() -> None:
    values = torch.zeros(1, 32, dtype=torch.float8_e4m3fn)
    values[0, :3] = torch.tensor([1.5, -448.0, 0.015625]).to(torch.float8_e4m3fn)
    restored = dequantize_mxfp8(values, torch.tensor([[120]], dtype=torch.uint8))
    assert restored[0, :4].tolist() == [0.01171875, -3.5, 0.0001220703125, 0.0]


@pytest.mark.parametrize("peak", [448.0, 449.0, 896.0, 1e-38, 1e-45, 3e38, 0.0])
def test_nothing_saturates_at_the_edges(peak: float) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 3] = peak
    restored = dequantize_mxfp8(*quantize_mxfp8(weight))
    assert restored.isfinite().all()
    assert restored[0, 3] == pytest.approx(peak, rel=1 / 16, abs=2.0**-135)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_mxfp8(torch.zeros(4, 48))
    with pytest.raises(ValueError, match="not finite"):
        quantize_mxfp8(torch.full((1, 32), float("nan")))
