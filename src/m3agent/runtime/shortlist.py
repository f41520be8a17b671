"""The likeliest tokens of many rows of logits, found on the device: some numbers go to the host instead of whole rows.

A vocabulary of 200,000 takes the host longer to look through than a GPU takes for a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m3agent.runtime.sampling import Sampling, draw

WIDTH = 64


@dataclass(frozen=True)
class Shortlist:
    """ids: [k] tokens by rising id; logits: [k] theirs; mass: log Σ exp of the whole row's logits. Every token with a
    logit above the least of these is among them, and of a single one it is known that no lower id has the same.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    mass: float


def shortlists(rows: Tensor, width: int) -> list[Shortlist]:
    """rows: [n, vocab] float32 on any device; width: how many tokens of each, at most. One copy to the host."""
    found = _found(rows, width).cpu().numpy()
    made: list[Shortlist] = []
    for row in found:
        logits, numbers = row[1:].reshape(2, -1)
        order = np.argsort(numbers)
        made.append(Shortlist(numbers[order].astype(np.int64), logits[order], float(row[0])))
    return made


def _found(rows: Tensor, width: int) -> Tensor:
    """Each row's mass, logits and ids, all as float32: ids below 2^24 are exact."""
    if width == 1 and rows.is_cuda:
        from m3agent.kernels.best_triton import best_of_rows

        return best_of_rows(rows)
    if width == 1:
        ids = rows.argmax(-1, keepdim=True)  # the first one of equal logits
        values = rows.gather(-1, ids)
    else:
        values, ids = rows.topk(min(width, rows.shape[1]))
    return torch.cat((rows.logsumexp(-1, keepdim=True), values, ids.float()), -1)


def choose_short(best: Shortlist, sampling: Sampling, source: torch.Generator) -> tuple[int, float] | None:
    """What `sampling.choose` says of the whole row, or None where the shortlist does not tell."""
    greedy = sampling.temperature == 0.0 or sampling.top_k == 1
    above = int((best.logits > best.logits.min()).sum())
    if not np.isfinite(best.mass):
        return None
    if greedy and (above or best.ids.size == 1):
        place = int(best.logits.argmax())
    elif not greedy and 0 < sampling.top_k <= above:
        place = draw(best.logits, sampling, source)
    else:
        return None
    return int(best.ids[place]), float(best.logits[place]) - best.mass
