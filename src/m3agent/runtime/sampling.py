"""From logits to one token, each request with its own settings and its own random numbers.

The order is: divide by the temperature, keep the top_k likeliest, of these the smallest set that holds top_p of
their mass, of these the ones with at least min_p of the likeliest one's probability; then draw. Each of the three
cuts keeps a prefix of the tokens in descending order, equal logits in ascending id, so the shortest one wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from m3agent.errors import NumericalError


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one call are chosen.

    temperature: 0 is greedy (of equal logits the lowest id). top_p: 1 keeps all. top_k: 0 keeps all. min_p: 0 keeps
    all. seed: the same seed over the same logits draws the same tokens; None draws new ones every time. max_tokens:
    None goes on until a stop token or the end of the context; 0 only computes the prompt. stop: token ids that end
    the reply, itself being part of it; None means the model's own (end of message, start of a role, of a document).

    Raises ValueError for a value outside its range; a stop token outside the vocabulary is told by the call.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: frozenset[int] | None = None

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0.0 <= self.temperature < math.inf, "0 or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (keep all) or more"),
            "min_p": (0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 0, "None or 0 or more"),
        }
        for name, (holds, wanted) in ranges.items():
            if not holds:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)}")

    def check_stop(self, vocabulary: int) -> None:
        """Raises ValueError for a stop token that a model with so many ids can never say."""
        for token in self.stop or ():
            if not isinstance(token, int) or not 0 <= token < vocabulary:
                raise ValueError(f"stop has {token!r}; the ids of this model go from 0 to {vocabulary - 1}")


def generator(seed: int | None) -> torch.Generator:
    """The random numbers of one request; they always come from the CPU, so that a seed means the same everywhere."""
    source = torch.Generator()
    if seed is None:
        source.seed()
    else:
        source.manual_seed(seed)
    return source


def choose(
    logits: NDArray[np.float32],
    sampling: Sampling,
    source: torch.Generator,
    allowed: NDArray[np.bool_] | None = None,
) -> tuple[int, float]:
    """One token id from logits [vocab], and its log-probability under the model itself (temperature 1, no cut).

    allowed: [vocab], the ids that may be chosen; the log-probability is that of the model without this restriction.

    Raises NumericalError when the logits hold NaN or no finite value at all.
    """
    top = int(logits.argmax())  # the first one of equal logits; a NaN wins, too
    peak = float(logits[top])
    if not math.isfinite(peak):
        raise NumericalError(
            "the model's logits are not finite: broken weights, or numbers beyond its dtype; load it with torch.float32"
        )
    open_logits = logits if allowed is None else np.where(allowed, logits, -np.inf)
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        token = top if allowed is None else int(open_logits.argmax())
    else:
        token = draw(open_logits, sampling, source)
    mass = float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64))
    return token, float(logits[token]) - peak - math.log(mass)


def kept_tokens(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The token ids that the cuts leave, and their probabilities (which sum to 1).

    For temperature > 0. Only tokens that can be kept are sorted: what the nucleus leaves out has less than 1 - top_p
    of the mass together, so a token below (1 - top_p) / vocab is never needed to fill it.
    """
    scaled = (logits.astype(np.float64) - float(logits.max())) / sampling.temperature
    ids = np.arange(scaled.size)
    if 0 < sampling.top_k < scaled.size:
        least = np.partition(scaled, scaled.size - sampling.top_k)[scaled.size - sampling.top_k]
        ids = np.flatnonzero(scaled >= least)  # more than top_k when several equal the least one
        ids = ids[np.argsort(-scaled[ids], kind="stable")][: sampling.top_k]
    weights = np.exp(scaled[ids])  # the likeliest token has weight 1
    total = weights.sum()
    if sampling.top_p < 1.0:
        needed = weights >= total * (1.0 - sampling.top_p) / weights.size
        ids, weights = ids[needed], weights[needed]
        order = np.argsort(-weights, kind="stable")
        ids, weights = ids[order], weights[order]
        count = int(np.searchsorted(np.cumsum(weights), total * sampling.top_p)) + 1
        ids, weights = ids[:count], weights[:count]
    if sampling.min_p > 0.0:
        likely = weights >= sampling.min_p
        ids, weights = ids[likely], weights[likely]
    return ids, weights / weights.sum()


def draw(logits: NDArray[np.float32], sampling: Sampling, source: torch.Generator) -> int:
    """One place of logits [n], for temperature > 0."""
    ids, probabilities = kept_tokens(logits, sampling)
    point = torch.rand((), generator=source, dtype=torch.float64).item()
    place = int(np.searchsorted(np.cumsum(probabilities), point, side="right"))
    return int(ids[min(place, ids.size - 1)])  # rounding can leave the last sum just under 1
