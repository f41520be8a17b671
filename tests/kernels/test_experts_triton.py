"""The experts' Triton kernels against the torch meaning in float64: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3agent.kernels.experts import routed_experts as meaning
from tests.kernels.triton_device import DEVICE, poisoned

triton_experts = pytest.importorskip("m3agent.kernels.experts_triton")

ALPHA, LIMIT = 1.702, 7.0


def inputs(n: int, experts: int, k: int, hidden: int, inner: int, *, favourite: int | None = None) -> list[Tensor]:
    source = torch.Generator().manual_seed(n * 1000 + experts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    scores = torch.rand(n, experts, generator=source)
    if favourite is not None:
        scores[:, favourite] = 2.0
    weights = torch.rand(n, k, generator=source) + 0.1
    return [
        normal(n, hidden) * 3,  # some gates leave the limit
        scores.topk(k).indices,
        weights / weights.sum(-1, keepdim=True) * 2,
        normal(experts, 2 * inner, hidden) * hidden**-0.5,
        normal(experts, hidden, inner) * inner**-0.5,
    ]


def rounded(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> list[Tensor]:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    return [
        x.to(DEVICE, dtype),
        chosen.to(DEVICE),
        weights.to(DEVICE),
        gate_up.to(DEVICE, dtype),
        down.to(DEVICE, dtype),
    ]


def error(found: Tensor, wanted: Tensor) -> float:
    found = found.cpu().double()
    return float((found - wanted).norm() / wanted.norm())


BOUND = 1e-2 if DEVICE == "cuda" else 1e-5


@pytest.mark.parametrize(
    ("n", "experts", "k", "hidden", "inner"),
    [(1, 8, 2, 64, 32), (2, 8, 3, 48, 80), (7, 16, 4, 64, 32), (33, 5, 2, 32, 64), (300, 4, 2, 64, 48)],
)
def test_as_the_meaning(n: int, experts: int, k: int, hidden: int, inner: int) -> None:
    exact = inputs(n, experts, k, hidden, inner)
    with poisoned():
        found = triton_experts.routed_experts(*rounded(*exact), ALPHA, LIMIT)
    assert error(found, meaning(*exact, ALPHA, LIMIT)) < BOUND


@pytest.mark.parametrize("path", ["few_rows_16", "few_rows_32", "many_rows"])
def test_each_way_alone(path: str) -> None:
    """The three ways take the same inputs, whichever of them the rule would choose; one expert has most rows."""
    exact = inputs(45, 6, 2, 64, 32, favourite=4)
    arguments = (*rounded(*exact), ALPHA, LIMIT)
    with poisoned():
        if path == "many_rows":
            found = triton_experts.many_rows(*arguments)
        else:
            found = triton_experts.few_rows(*arguments, rows=int(path[-2:]))
    assert error(found, meaning(*exact, ALPHA, LIMIT)) < BOUND


@pytest.mark.parametrize(
    ("n", "experts", "k", "rows"), [(1, 4, 2, 16), (50, 7, 3, 16), (2000, 5, 3, 32), (40, 130, 1, 16)]
)
def test_plan(n: int, experts: int, k: int, rows: int) -> None:
    chosen = torch.rand(n, experts).topk(k).indices.to(DEVICE)
    with poisoned():
        plan = triton_experts.plan(chosen, experts, rows)
    flat = chosen.flatten().cpu()
    assert plan.order.cpu().tolist() == flat.argsort(stable=True).tolist()
    assert plan.place[plan.order.long()].cpu().tolist() == list(range(n * k))
    tiles = int(plan.tiles.item())
    ranges = zip(plan.expert[:tiles].tolist(), plan.row[:tiles].tolist(), plan.end[:tiles].tolist(), strict=True)
    covered: list[int] = []
    for expert, row, end in ranges:
        assert 0 < end - row <= rows
        assert set(flat[plan.order[row:end].cpu().long()].tolist()) == {expert}
        covered += range(row, end)
    assert covered == list(range(n * k))
