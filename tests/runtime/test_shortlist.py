"""A shortlist says what the whole row would say, or that it cannot tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from m3agent.runtime.sampling import Sampling, choose, generator
from m3agent.runtime.shortlist import WIDTH, choose_short, shortlists

GREEDY = Sampling(temperature=0.0)
VOCABULARY = 5000


def rows(count: int = 6) -> torch.Tensor:
    """Logits as a half-precision head gives them: with many equal ones."""
    return (torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3).bfloat16().float()


@pytest.mark.parametrize("width", [1, WIDTH])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(1.0, top_k=1), Sampling(1.0, top_k=20), Sampling(0.7, 0.9, top_k=40), Sampling(1.5, 1.0, 8, 0.1)],
)
def test_the_same_token_and_probability(sampling: Sampling, width: int) -> None:
    told = 0
    for row, best in zip(rows(), shortlists(rows(), width), strict=True):
        for seed in range(20):
            found = choose_short(best, sampling, generator(seed))
            if found is not None:
                token, logprob = choose(row.numpy(), sampling, generator(seed))
                assert found[0] == token
                assert found[1] == pytest.approx(logprob, abs=1e-4)
                told += 1
    assert told == (120 if sampling.temperature == 0.0 or sampling.top_k == 1 or width == WIDTH else 0)


def test_of_equal_logits_the_lowest_id() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, [4000, 70, 300]] = 5.0
    for width in (1, WIDTH):
        found = choose_short(shortlists(row, width)[0], GREEDY, generator(0))
        assert found is not None
        assert found[0] == 70


def test_what_a_shortlist_cannot_tell() -> None:
    """Too many equal ones, cuts that need the whole row, numbers that are none."""
    flat = shortlists(torch.zeros(1, VOCABULARY), WIDTH)[0]
    assert choose_short(flat, GREEDY, generator(0)) is None
    assert choose_short(flat, Sampling(1.0, top_k=5), generator(0)) is None
    some = shortlists(rows(1), WIDTH)[0]
    for sampling in (Sampling(1.0), Sampling(1.0, 0.9), Sampling(1.0, top_k=WIDTH + 1)):
        assert choose_short(some, sampling, generator(0)) is None
    for bad in (float("nan"), float("inf")):
        row = rows(1)
        row[0, 9] = bad
        assert choose_short(shortlists(row, 1)[0], replace(GREEDY, seed=1), generator(0)) is None
