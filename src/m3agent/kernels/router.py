"""The sigmoid router: a bias corrects which experts are chosen, never how much they weigh."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(x: Tensor, weight: Tensor, bias: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Chosen experts [n, count] int64 and their weights [n, count], which sum to 1.

    x: [n, hidden] of any dtype; weight: [experts, hidden] and bias: [experts], both float32, as is the arithmetic.
    """
    scores = torch.sigmoid(F.linear(x.float(), weight))
    chosen = torch.topk(scores + bias, count, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True)
