"""Sampling against a plain float64 definition, and the distribution of what is drawn against the probabilities."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from m3agent.errors import NumericalError
from m3agent.runtime.sampling import Sampling, choose, generator, kept_tokens


def reference(logits: np.ndarray, s: Sampling) -> dict[int, float]:
    """The three cuts one after another over all tokens, token by token."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if s.top_k:
        order = order[: s.top_k]
    peak = float(logits[order[0]])
    weight = {i: math.exp((float(logits[i]) - peak) / s.temperature) for i in order}
    total = math.fsum(weight.values())
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weight[i]
        if s.top_p < 1.0 and mass >= total * s.top_p:
            break
    kept = [i for i in kept if weight[i] >= s.min_p]
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


# Multiples of 1/4 make ties common and sums exact enough that no cut falls between two roundings.
LOGITS = arrays(np.float32, st.integers(1, 40), elements=st.integers(-40, 40).map(lambda n: np.float32(n / 4)))


@settings(max_examples=300)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([0.1, 0.5, 0.83, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 100]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)
def test_the_kept_tokens_and_their_probabilities(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    s = Sampling(temperature, top_p, top_k, min_p)
    ids, probabilities = kept_tokens(logits, s)
    expected = reference(logits, s)
    assert set(ids.tolist()) == set(expected)
    for i, p in zip(ids.tolist(), probabilities.tolist(), strict=True):
        assert p == pytest.approx(expected[i], rel=1e-9)


@pytest.mark.parametrize(
    "s", [Sampling(), Sampling(0.6), Sampling(1.0, 0.7), Sampling(1.3, 1.0, 5), Sampling(1.0, 0.95, 12, 0.1)]
)
def test_draws_follow_the_probabilities(s: Sampling) -> None:
    logits = np.random.default_rng(3).normal(size=24).astype(np.float32) * 1.5
    expected = reference(logits, s)
    source, draws = generator(11), 20_000
    counts = np.bincount([choose(logits, s, source)[0] for _ in range(draws)], minlength=24)
    assert set(np.flatnonzero(counts)) <= set(expected)
    # Chi-squared over the tokens that are likely enough; 4 standard deviations above its mean.
    likely = [i for i, p in expected.items() if p * draws > 20]
    chi = sum((counts[i] - expected[i] * draws) ** 2 / (expected[i] * draws) for i in likely)
    assert chi < len(likely) + 4 * math.sqrt(2 * len(likely))


def test_greedy_takes_the_lowest_of_equal_ids_and_needs_no_random_number() -> None:
    logits = np.zeros(1000, np.float32)
    logits[[700, 44, 901]] = 2.5
    source = generator(5)
    before = source.get_state()
    assert choose(logits, Sampling(temperature=0.0), source)[0] == 44
    assert source.get_state().equal(before)


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    logits = np.zeros(4096, np.float32)

    def draw(seed: int | None) -> list[int]:
        source = generator(seed)
        return [choose(logits, Sampling(), source)[0] for _ in range(8)]

    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_logprob_is_the_models_own_whatever_the_settings() -> None:
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    full = np.exp(logits.astype(np.float64))
    for s in (Sampling(temperature=0.0), Sampling(0.2, 0.5), Sampling(2.0, 1.0, 2)):
        token, logprob = choose(logits, s, generator(0))
        assert logprob == pytest.approx(math.log(full[token] / full.sum()), abs=1e-6)


@pytest.mark.parametrize("bad", [[1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_logits_that_are_not_finite_are_refused(bad: list[float]) -> None:
    with pytest.raises(NumericalError, match="not finite"):
        choose(np.array(bad, np.float32), Sampling(), generator(0))


def test_a_token_ruled_out_by_minus_infinity_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf], np.float32)
    assert {choose(logits, Sampling(2.0), generator(seed))[0] for seed in range(20)} == {1}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 2.0}, {"max_tokens": -1}]
)
def test_settings_out_of_range_name_the_setting(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
