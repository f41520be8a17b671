"""Drafts: what is proposed, when, and that they change how long an answer takes and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from m3agent.errors import ContextOverflow
from m3agent.model import KVPages, M3Model, Span
from m3agent.runtime import Runtime, Sampling
from m3agent.runtime.log import TokenLog
from m3agent.runtime.runtime import Opening
from m3agent.runtime.sampling import kept_tokens
from m3agent.runtime.sequence import TokenStream
from m3agent.runtime.speculate import MATCH, Draft, Speculation, StepCosts, Trust
from tests.runtime.tiny import uncached_logits, watch

pytestmark = pytest.mark.anyio

Open = Callable[..., Opening]
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16] * 3


def draft_of(tokens: list[int]) -> Draft:
    log = TokenLog()
    log.extend(tokens)
    return Draft(log, len(tokens))


class Always(Speculation):
    """Checks every draft, as long as it is."""

    def lengths(self, drafts: Any) -> list[int]:
        return [length for _, length in drafts]


def guess(runtime: Runtime, propose: Callable[[list[int], int], list[int]]) -> None:
    """Have the runtime check these drafts at every step, of the tokens emitted so far and the most that fit."""
    runtime.engine._steps._speculation = Always()

    class Guesses(Draft):
        def propose(self, emitted: Any, most: int) -> list[int]:
            return propose(list(emitted), most)[:most]

    submit = runtime.engine.submit

    def submitted(request: Any) -> None:
        request.draft = Guesses(request.log, request.prompt)
        submit(request)

    runtime.engine.submit = submitted


async def said(runtime: Runtime, prompt: list[int], sampling: Sampling) -> list[int]:
    sequence = runtime.sequence()
    sequence.append(prompt)
    async with sequence.generate(sampling) as stream:
        tokens = [token.id async for token in stream]
    assert sequence.tokens == prompt + tokens
    return tokens


async def read(stream: TokenStream) -> list[int]:
    return [token.id async for token in stream]


# What is proposed ---------------------------------------------------------------------------------------------------


def test_a_draft_is_what_followed_the_longest_agreement() -> None:
    draft = draft_of([1, 2, 3, 4, 5, 9, 2, 3, 6, 6, 1, 2, 3])
    assert draft.propose([], 4) == [4, 5, 9, 2]  # 1 2 3 and not the later 2 3
    assert draft.matched == 3
    assert draft.propose([4, 5], 2) == [9, 2]  # it goes on from there
    assert draft.matched == 5
    assert draft.propose([4, 5, 6], 3) == [6, 1, 2]  # another token came: a look at all the past again
    assert draft.matched == 1


def test_after_a_change_the_text_goes_on_behind_the_place_that_was_left() -> None:
    line = [20, 21, 22]
    draft = draft_of([0, 1, *line, 2, *line, 3, *line, 4, 0, 1, *line])
    assert draft.propose([], 1) == [2]
    assert draft.propose([50, *line], 1) == [3]  # 2 became 50; not the last line's 4


def test_a_short_past_is_a_period() -> None:
    assert draft_of([5, 1, 2, 1, 2]).propose([], 7) == [1, 2, 1, 2, 1, 2, 1]
    assert draft_of([3, 3]).propose([], 3) == [3, 3, 3]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]])
def test_nothing_is_proposed_without_a_past(tokens: list[int]) -> None:
    assert draft_of(tokens).propose([], 5) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 3), max_size=40), st.data())
def test_the_past_that_is_followed_agrees_as_far_as_it_says(
    log: list[int], new: list[int], data: st.DataObject
) -> None:
    draft, told = draft_of(log), 0
    while True:
        text = log + new[:told]
        found = draft.propose(new[:told], 8)
        longest = max(
            (n for n in range(1, len(text)) if any(text[i : i + n] == text[-n:] for i in range(len(text) - n))),
            default=0,
        )
        assert bool(found) == bool(longest)
        if found:
            assert len(found) == 8
            end = len(text) - draft.matched
            places = [i for i in range(end) if text[i : i + draft.matched] == text[end:]]
            nexts = [i + draft.matched for i in places]
            assert found in [np.resize(text[place:], 8).tolist() for place in nexts]
        if told == len(new):
            break
        told += data.draw(st.integers(1, len(new) - told))


def test_agreement_is_counted_up_to_a_limit() -> None:
    draft = draft_of(list(range(100)) * 2)
    assert draft.propose([], 3) == [0, 1, 2]
    assert draft.matched == MATCH


# When it is worth it ------------------------------------------------------------------------------------------------


def test_trust_follows_what_happened() -> None:
    trust = Trust()
    before = trust.of(4)
    for _ in range(200):
        trust.learn(4, False)
    assert trust.of(4) < 0.02 < before
    assert trust.of(9) == Trust().of(9)  # of longer agreement nothing was learned
    for _ in range(200):
        trust.learn(4, True)
    assert trust.of(4) > 0.95


def speculation(cost: Callable[[int], float], sequences: int = 1) -> Speculation:
    found = Speculation()
    for _ in range(50):
        found.costs.learn(sequences, sequences, 1.0)
        for rows in range(sequences + 1, 129):
            found.costs.learn(sequences, rows, cost(rows))
    return found


def test_the_longest_draft_where_rows_cost_nothing_and_none_where_they_cost_all() -> None:
    assert speculation(lambda rows: 1.0).lengths([(20, 31)]) == [31]
    assert speculation(lambda rows: float(rows)).lengths([(32, 31)]) == [0]
    assert speculation(lambda rows: 1.0 + 0.1 * rows).lengths([(20, 0)]) == [0]


def test_no_draft_before_plain_steps_were_timed() -> None:
    assert Speculation().lengths([(32, 31)]) == [0]


def test_the_likelier_draft_of_two_sequences_gets_the_rows() -> None:
    short, long = speculation(lambda rows: 1.0 + 0.08 * rows, sequences=2).lengths([(1, 31), (32, 31)])
    assert short == 0
    assert long > 0


def test_costs_that_were_never_seen_are_guessed_from_the_ones_below() -> None:
    costs = StepCosts()
    costs.learn(1, 1, 2.0)
    costs.learn(1, 4, 6.0)
    assert costs.of(1, 4) == 3.0
    assert 3.0 < costs.of(1, 8) < costs.of(1, 16) < 6.0


async def test_text_without_repetition_is_generated_without_drafts(opening: Open) -> None:
    async with opening() as runtime:
        for _ in range(200):
            for matched in (1, 2, 3, 5, 9, 17):
                runtime.engine._steps._speculation.trust.learn(matched, False)
        await said(runtime, PROMPT, Sampling(temperature=1.0, seed=1, max_tokens=60))
        assert runtime.stats().drafted_tokens == 0


# That it changes nothing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
async def test_the_tokens_are_those_without_drafts(opening: Open, temperature: float, right: float) -> None:
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=120, stop=frozenset())
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: [])
        expected = await said(runtime, PROMPT, sampling)
        assert runtime.stats().drafted_tokens == 0
    luck = np.random.default_rng(0)
    async with opening() as runtime:

        def propose(emitted: list[int], most: int) -> list[int]:
            ahead = expected[len(emitted) : len(emitted) + most]
            return [token if luck.random() < right else (token + 1) % 320 for token in ahead]

        guess(runtime, propose)
        assert await said(runtime, PROMPT, sampling) == expected
        stats = runtime.stats()
        assert stats.drafted_tokens > 100
        assert stats.output_tokens == 120
        if right == 1.0:
            assert stats.accepted_tokens == stats.drafted_tokens
            assert stats.steps < 10  # over the edges of blocks of 8, and beyond the 3 blocks that are chosen
        if right == 0.0:
            assert stats.accepted_tokens == 0


async def test_drafts_of_the_runtimes_own_are_right_for_a_text_that_repeats_itself(opening: Open) -> None:
    """The tiny model's greedy text runs into a circle, which suffixes find."""
    sampling = Sampling(temperature=0.0, max_tokens=300, stop=frozenset())
    async with opening() as runtime:
        runtime.engine._steps._speculation = Always()
        tokens = await said(runtime, PROMPT, sampling)
        assert runtime.stats().accepted_tokens > 30
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: [])
        assert await said(runtime, PROMPT, sampling) == tokens


async def test_sampled_tokens_keep_their_distribution(opening: Open, model: M3Model) -> None:
    """Chi-square of the second of two tokens, drafted by a token that is right about half of the time."""
    sampling = Sampling(temperature=0.7, top_k=6, max_tokens=2, stop=frozenset())
    first_ids, first = kept_tokens(uncached_logits(model, PROMPT)[-1].numpy(), sampling)
    expected: Counter[tuple[int, int]] = Counter()
    for one, p in zip(first_ids.tolist(), first, strict=True):
        ids, shares = kept_tokens(uncached_logits(model, [*PROMPT, one])[-1].numpy(), sampling)
        for two, q in zip(ids.tolist(), shares, strict=True):
            expected[one, two] += p * q
    likely = {one: max(expected, key=lambda pair: expected[pair] * (pair[0] == one))[1] for one in first_ids.tolist()}
    runs = 1500
    seen: Counter[tuple[int, int]] = Counter()
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: [likely.get(emitted[-1], 0)])
        base = runtime.sequence()
        base.append(PROMPT)
        await base.logits()
        for seed in range(runs):
            with_seed = Sampling(temperature=0.7, top_k=6, max_tokens=3, stop=frozenset(), seed=seed)
            fork = base.fork()
            async with fork.generate(with_seed) as stream:
                one, two, _ = [token.id async for token in stream]
            seen[one, two] += 1
            fork.close()
        assert 0.1 < runtime.stats().accepted_tokens / runtime.stats().drafted_tokens < 0.9
    assert set(seen) <= set(expected)
    counts = [(seen[pair], share * runs) for pair, share in expected.items()]
    rare = [pair for pair in counts if pair[1] < 5]
    common = [pair for pair in counts if pair[1] >= 5] + [(sum(o for o, _ in rare), sum(e for _, e in rare))]
    statistic = sum((observed - wanted) ** 2 / wanted for observed, wanted in common if wanted)
    degrees = len(common) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


async def test_a_stop_token_inside_a_draft_ends_the_answer(opening: Open) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=40, stop=frozenset())
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: [])
        tokens = await said(runtime, PROMPT, sampling)
    stop = tokens[9]
    expected = tokens[: tokens.index(stop) + 1]
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: tokens[len(emitted) : len(emitted) + most])
        sequence = runtime.sequence()
        sequence.append(PROMPT)
        async with sequence.generate(Sampling(temperature=0.0, stop=frozenset({stop}))) as stream:
            assert [token.id async for token in stream] == expected
            assert stream.finish == "stop"
            assert stream.usage.accepted_tokens == len(expected) - 1
        assert sequence.cached_tokens == len(PROMPT) + len(expected) - 1  # the last one was not computed


@pytest.mark.parametrize("most", [1, 2, 3, 9])
async def test_no_more_tokens_than_asked_for(opening: Open, most: int) -> None:
    async with opening() as runtime:
        guess(runtime, lambda emitted, room: [1] * room)
        assert len(await said(runtime, PROMPT, Sampling(temperature=0.0, max_tokens=most, stop=frozenset()))) == most


async def test_what_was_rejected_is_never_found_by_another_sequence(opening: Open, model: M3Model) -> None:
    """Wrong tokens were computed over the edges of pages; whoever goes on with these very tokens computes them."""
    sampling = Sampling(temperature=0.0, max_tokens=20, stop=frozenset())
    wrong = [200 + i for i in range(16)]
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: wrong)
        tokens = await said(runtime, PROMPT, sampling)
        assert runtime.stats().drafted_tokens > 100
        for place in range(len(tokens)):
            other = runtime.sequence()
            other.append([*PROMPT, *tokens[: place + 1], *wrong])
            found = await other.logits()
            expected = uncached_logits(model, other.tokens)[-1]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            other.close()


async def test_a_stream_that_is_left_inside_a_draft_keeps_what_was_taken(opening: Open, model: M3Model) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=100, stop=frozenset())
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: [])
        tokens = await said(runtime, PROMPT, sampling)
    for take in (1, 2, 5, 11):
        async with opening() as runtime:
            guess(runtime, lambda emitted, most: tokens[len(emitted) : len(emitted) + most])
            sequence = runtime.sequence()
            sequence.append(PROMPT)
            async with sequence.generate(sampling) as stream:
                for _ in range(take):
                    await anext(stream)
            assert sequence.tokens == PROMPT + tokens[:take]
            expected = uncached_logits(model, sequence.tokens)[-1]
            torch.testing.assert_close(await sequence.logits(), expected, atol=1e-4, rtol=1e-4)


async def test_a_guide_sees_one_token_after_the_other(opening: Open) -> None:
    class Odd:
        """Only ids that leave the rest of the count so far."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def allowed(self) -> NDArray[np.bool_]:
            return np.arange(320) % 5 == len(self.seen) % 5

        def accept(self, token: int) -> None:
            assert token % 5 == len(self.seen) % 5
            self.seen.append(token)

    sampling = Sampling(temperature=1.0, seed=5, max_tokens=50, stop=frozenset())
    answers: list[list[int]] = []
    for _ in range(2):  # the second time with the first answer as draft
        async with opening() as runtime:
            guess(runtime, lambda emitted, most: answers[0][len(emitted) :][:most] if answers else [])
            sequence = runtime.sequence()
            sequence.append(PROMPT)
            guide = Odd()
            async with sequence.generate(sampling, guide) as stream:
                answers.append([token.id async for token in stream])
            assert guide.seen == answers[-1]
    assert answers[0] == answers[1]


async def test_streams_side_by_side_with_and_without_drafts(opening: Open) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=60, stop=frozenset())
    prompts = [PROMPT[n:] for n in range(6)]
    async with opening() as runtime:
        guess(runtime, lambda emitted, most: [])
        expected = [await said(runtime, prompt, sampling) for prompt in prompts]
    async with opening(2048) as runtime:
        luck = np.random.default_rng(1)
        known = {tuple(answer[:1]): answer for answer in expected}
        answers: dict[int, list[int]] = {}

        def propose(emitted: list[int], most: int) -> list[int]:
            answer = known.get(tuple(emitted[:1]), [])
            return answer[len(emitted) : len(emitted) + int(luck.integers(0, most + 1))]

        guess(runtime, propose)

        async def one(place: int) -> None:
            answers[place] = await said(runtime, prompts[place], sampling)

        async with anyio.create_task_group() as group:
            for place in range(len(prompts)):
                group.start_soon(one, place)
        assert [answers[place] for place in range(len(prompts))] == expected


async def test_drafts_take_no_pages_from_others(opening: Open) -> None:
    """With a cache that two sequences fill, the drafts of one do not make the other wait."""
    async with opening(cache_tokens=160) as runtime:
        guess(runtime, lambda emitted, most: [1] * most)
        sampling = Sampling(temperature=0.0, max_tokens=45, stop=frozenset())
        async with anyio.create_task_group() as group:
            for start in (0, 3):
                group.start_soon(said, runtime, PROMPT[start:], sampling)
        assert runtime.stats().preemptions == 0


async def test_the_end_of_the_context_is_reached_and_not_passed(opening: Open) -> None:
    async with opening(cache_tokens=4096) as runtime:
        guess(runtime, lambda emitted, most: [1] * most)
        spans: list[int] = []
        watch(runtime, lambda step: spans.extend(span.end for span in step))
        sequence = runtime.sequence()
        sequence.append((PROMPT * 70)[:2030])
        async with sequence.generate(Sampling(temperature=0.0, stop=frozenset())) as stream:
            with pytest.raises(ContextOverflow):
                await read(stream)
        assert max(spans) == 2048 == len(sequence) - 1


# The model's own part ------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.data())
def test_logits_of_the_last_rows_of_each_span(model: M3Model, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    wanted = [data.draw(st.integers(1, count)) for count in counts]
    pages = KVPages.allocate(model.config, 3 * len(counts), model.dtype, model.device)
    spans = [
        Span(torch.randint(0, 250, (count,)), 0, torch.arange(3 * place, 3 * place + 3))
        for place, count in enumerate(counts)
    ]
    every = model.forward(spans, pages, "all")
    for whole, part, rows in zip(every, model.forward(spans, pages, wanted), wanted, strict=True):
        torch.testing.assert_close(part, whole[-rows:])
