"""Muon for the matrices inside the network, AdamW for the rest, one learning rate for both.

Muon: momentum, then the nearest orthogonal matrix by Newton-Schulz iteration (Jordan et al. 2024), scaled so that
an update has the root mean square of an AdamW update (Liu et al. 2025, "Muon is scalable for LLM training").
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MOMENTUM, DECAY, MATCH_RMS = 0.95, 0.02, 0.2


def orthogonalise(g: Tensor) -> Tensor:
    """The orthogonal factor of each matrix in g [n, rows, columns], roughly, in bf16 by five quintic steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Takes matrices [rows, columns] and stacks of them [n, rows, columns]; equal shapes are updated together."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                by_shape[tuple(p.shape[-2:])].append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - MOMENTUM)
                    updates.append(p.grad.lerp(state["momentum"], MOMENTUM).view(-1, *shape))
                scale = MATCH_RMS * max(shape) ** 0.5 * group["lr"]
                turned = orthogonalise(torch.cat(updates)).split([len(u) for u in updates])
                torch._foreach_mul_(params, 1 - DECAY * group["lr"])
                torch._foreach_add_(
                    params, [t.view_as(p).float() for t, p in zip(turned, params, strict=True)], alpha=-scale
                )


def optimisers(net: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    matrices, rest = [], []
    for name, p in net.named_parameters():
        inner = p.dim() >= 2 and name not in ("embed", "head") and not name.endswith("router")
        (matrices if inner else rest).append(p)
    fused = rest[0].is_cuda
    return [Muon(matrices, lr), torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)]
