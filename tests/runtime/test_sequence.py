"""Sequences on the tiny model: nothing computed twice, logits as without a cache, forks, cancelling, closing."""

import gc
import random
from collections.abc import Callable

import anyio
import pytest
import torch

from m3agent.errors import ContextOverflow, RuntimeClosed, SessionBusy
from m3agent.model import M3Model
from m3agent.runtime import Runtime, Sampling, Sequence, Token, TokenStream
from m3agent.runtime.runtime import Opening
from tests.runtime.tiny import TEXT, uncached_logits

pytestmark = pytest.mark.anyio
Open = Callable[..., Opening]
NO_STOP = frozenset[int]()


def prompt(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def sampled(max_tokens: int, seed: int | None = 1) -> Sampling:
    return Sampling(1.0, seed=seed, max_tokens=max_tokens, stop=NO_STOP)


async def generated(sequence: Sequence, sampling: Sampling) -> list[Token]:
    async with sequence.generate(sampling) as stream:
        return [token async for token in stream]


async def rest(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


async def check_logits(sequence: Sequence, model: M3Model) -> None:
    expected = uncached_logits(model, sequence.tokens)[-1]
    torch.testing.assert_close(await sequence.logits(), expected, rtol=0, atol=1e-5)


async def test_ten_turns_compute_no_token_twice(opening: Open, model: M3Model) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        for turn in range(10):
            before = len(sequence)
            sequence.append(prompt(7 + turn, turn))
            async with sequence.generate(sampled(9, turn)) as stream:
                made = [token.id async for token in stream]
            usage = stream.usage
            assert sequence.tokens[before:] == prompt(7 + turn, turn) + made
            assert usage.prompt_tokens == before + 7 + turn
            assert usage.recomputed_tokens == 0
            # the last token of a turn is in the log and not yet in the cache
            assert usage.reused_tokens == max(0, before - 1)
            assert usage.computed_tokens == usage.prompt_tokens - usage.reused_tokens
            assert usage.output_tokens == 9
        assert len(sequence) > 4 * TEXT.topk_blocks * TEXT.block_size
        assert runtime.stats().recomputed_tokens == 0
        assert runtime.stats().computed_tokens == len(sequence) - 10 * 9 + 9
        await check_logits(sequence, model)
        assert runtime.stats().recomputed_tokens == 0


async def test_streamed_logprobs_are_those_of_an_uncached_run(opening: Open, model: M3Model) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(50))
        made = await generated(sequence, sampled(20))
        logprobs = uncached_logits(model, sequence.tokens).log_softmax(-1)
        for position, token in enumerate(made, start=49):
            assert token.logprob == pytest.approx(float(logprobs[position, token.id]), abs=1e-5)


async def test_the_same_chunks_give_the_same_bits(opening: Open) -> None:
    """A prompt in one call, and in two calls that part where chunks part anyway, even on reused, scattered pages."""
    ids = prompt(700)
    async with opening() as runtime:
        whole = runtime.sequence()
        whole.append(ids)
        expected = await whole.logits()
    async with opening() as runtime:  # another one, which knows nothing of these tokens
        holes = [runtime.sequence() for _ in range(8)]
        for hole in holes:
            hole.append(prompt(40, 9))
            await hole.logits()
        for hole in holes[::2]:
            hole.close()
        parted = runtime.sequence()
        parted.append(ids[:512])
        await parted.logits()
        parted.append(ids[512:])
        assert torch.equal(await parted.logits(), expected)


async def test_greedy_is_the_uncached_argmax(opening: Open, model: M3Model) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(30))
        made = await generated(sequence, Sampling(0.0, max_tokens=12, stop=NO_STOP))
        logits = uncached_logits(model, sequence.tokens)
        assert [token.id for token in made] == logits[29:-1].argmax(-1).tolist()


async def test_a_seed_gives_the_same_tokens_alone_and_beside_others(opening: Open) -> None:
    async with opening() as runtime:
        alone = runtime.sequence()
        alone.append(prompt(20))
        expected = await generated(alone, sampled(30))
        results: list[list[Token]] = []

        async def run(seed: int) -> None:
            sequence = runtime.sequence()
            sequence.append(prompt(20))
            results.append(await generated(sequence, sampled(30, seed)))

        async with anyio.create_task_group() as group:
            for seed in (1, 2, 3, 1):
                group.start_soon(run, seed)
        same = [result for result in results if [t.id for t in result] == [t.id for t in expected]]
        assert len(same) == 2


async def test_a_stop_token_ends_the_stream_and_is_part_of_it(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(10))
        async with sequence.generate(Sampling(0.0, max_tokens=50, stop=frozenset(range(320)))) as stream:
            made = [token.id async for token in stream]
        assert len(made) == 1
        assert stream.finish == "stop"
        assert sequence.tokens[10:] == made


@pytest.mark.parametrize("taken", [0, 1, 5])
async def test_leaving_early_keeps_what_was_taken(opening: Open, model: M3Model, taken: int) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(21))
        made: list[int] = []
        async with sequence.generate(sampled(1000)) as stream:
            while len(made) < taken:
                made.append((await anext(stream)).id)
            await anyio.sleep(0.02)  # the worker runs ahead
        assert stream.finish == "cancelled"
        assert sequence.tokens == prompt(21) + made
        assert runtime.stats().active_requests == 0
        assert runtime.stats().used_pages == -(-sequence.cached_tokens // TEXT.block_size)
        sequence.append(prompt(15, 4))
        await generated(sequence, sampled(6))
        await check_logits(sequence, model)


async def test_leaving_right_at_the_stop_token_is_no_cancel(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(10))
        async with sequence.generate(Sampling(0.0, stop=frozenset(range(320)))) as stream:
            await anext(stream)
        assert stream.finish == "stop"


async def test_generating_on_after_leaving_early_without_a_new_prompt(opening: Open, model: M3Model) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(21))
        async with sequence.generate(sampled(1000)) as stream:
            await anext(stream)
            await anyio.sleep(0.02)
        await generated(sequence, sampled(10))
        await check_logits(sequence, model)


async def test_cancelling_the_task_stops_within_a_step(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(30))
        with anyio.move_on_after(0.05) as scope:
            async with sequence.generate(sampled(2000)) as stream:
                async for _ in stream:
                    pass
        assert scope.cancelled_caught
        assert runtime.stats().active_requests == 0
        steps = runtime.stats().steps
        await anyio.sleep(0.02)
        assert runtime.stats().steps == steps
        sequence.close()
        assert runtime.stats().used_pages == 0


async def test_forks_share_pages_and_go_their_own_ways(opening: Open, model: M3Model) -> None:
    async with opening() as runtime:
        parent = runtime.sequence()
        parent.append(prompt(98))  # with what follows, the last page is half full
        await generated(parent, sampled(3))
        used = runtime.stats().used_pages
        children = [parent.fork() for _ in range(16)]
        assert runtime.stats().used_pages == used
        parent.close()
        assert runtime.stats().used_pages == used
        computed = runtime.stats().computed_tokens

        async def diverge(child: Sequence, seed: int) -> None:
            child.append(prompt(4, seed))
            await generated(child, sampled(2, seed))

        async with anyio.create_task_group() as group:
            for seed, child in enumerate(children):
                group.start_soon(diverge, child, seed)
        assert runtime.stats().computed_tokens - computed == 16 * 5  # the last token of the parent, and four
        assert len({tuple(child.tokens) for child in children}) == 16
        for child in children[:4]:
            await check_logits(child, model)
        for child in children:
            child.close()
        assert runtime.stats().used_pages == 0


async def test_a_fork_knows_the_logits_that_its_parent_knew(opening: Open) -> None:
    async with opening() as runtime:
        parent = runtime.sequence()
        parent.append(prompt(16))
        expected = await parent.logits()
        child = parent.fork()
        steps = runtime.stats().steps
        assert torch.equal(await child.logits(), expected)
        assert len(await generated(child, sampled(1))) == 1
        assert runtime.stats().steps == steps


async def test_a_full_cache_ends_one_request_and_leaves_the_others(opening: Open, model: M3Model) -> None:
    async with opening(cache_tokens=160) as runtime:
        small, large = runtime.sequence(), runtime.sequence()
        small.append(prompt(9))  # its second page has room for all that it will generate
        large.append(prompt(140))
        outcome: list[Exception] = []

        async def overflow() -> None:
            with pytest.raises(ContextOverflow, match="KV cache is full") as caught:
                await generated(large, sampled(500))
            outcome.append(caught.value)

        async with anyio.create_task_group() as group:
            group.start_soon(overflow)
            made = await generated(small, sampled(7))
        assert len(made) == 7
        assert len(outcome) == 1
        assert len(large) >= 140
        other = small.fork()
        small.close()
        large.close()
        await check_logits(other, model)


async def test_prompts_that_can_never_fit_are_refused_before_work(opening: Open) -> None:
    async with opening(cache_tokens=64) as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(65))
        with pytest.raises(ContextOverflow, match="larger than the whole KV cache of 64"):
            await generated(sequence, sampled(1))
        sequence.append(prompt(3000))
        with pytest.raises(ContextOverflow, match="model's context of 2048"):
            await generated(sequence, sampled(1))
        assert runtime.stats().steps == 0


async def test_the_end_of_the_context(opening: Open) -> None:
    async with opening(cache_tokens=4096) as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(2045))
        with pytest.raises(ContextOverflow, match="context of 2048 tokens is full"):
            await generated(sequence, sampled(10))
        assert len(sequence) == 2049  # the last token follows from the whole context and has no place in it


async def test_one_stream_at_a_time(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(5))
        async with sequence.generate(sampled(10)) as stream:
            with pytest.raises(SessionBusy):
                sequence.append([1])
            with pytest.raises(SessionBusy):
                sequence.fork()
            with pytest.raises(SessionBusy):
                await sequence.logits()
            assert len([token async for token in stream]) == 10
        with pytest.raises(RuntimeError, match="entered once"):
            await stream.__aenter__()
        with pytest.raises(RuntimeError, match="async with"):
            await anext(sequence.generate())


async def test_closing_a_sequence_ends_its_stream(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(5))
        async with sequence.generate(sampled(1500)) as stream:
            await anext(stream)
            sequence.close()
            sequence.close()
            with pytest.raises(RuntimeClosed):
                await rest(stream)
        assert runtime.stats().used_pages == 0
        with pytest.raises(RuntimeClosed):
            sequence.append([1])


async def test_what_is_forgotten_gives_its_pages_back(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(50))
        await generated(sequence, sampled(3))
        del sequence
        gc.collect()
        assert runtime.stats().used_pages == 0
        stream = runtime.sequence().generate(sampled(2000))
        stream._sequence.append(prompt(5))
        await stream.__aenter__()
        await anext(stream)
        del stream
        gc.collect()
        with anyio.fail_after(5):
            while (stats := runtime.stats()).used_pages or stats.active_requests or stats.waiting_requests:
                await anyio.sleep(0.001)


async def test_a_forgotten_stream_leaves_the_sequence_usable(opening: Open, model: M3Model) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(5))
        stream = sequence.generate(sampled(2000))
        await stream.__aenter__()
        first = await anext(stream)
        await anyio.sleep(0.01)
        del stream
        gc.collect()
        sequence.append(prompt(30, 2))
        await generated(sequence, sampled(3))
        assert sequence.tokens[:36] == [*prompt(5), first.id, *prompt(30, 2)]
        await check_logits(sequence, model)


async def test_empty_sequences_and_wrong_ids(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        with pytest.raises(ValueError, match="empty"):
            await sequence.logits()
        with pytest.raises(ValueError, match="outside the vocabulary"):
            sequence.append([320])
        assert sequence.tokens == []


async def test_the_loop_stays_free_while_the_model_works(opening: Open) -> None:
    async with opening(4096) as runtime:
        sequence = runtime.sequence()
        sequence.append(prompt(2000))
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await anyio.sleep(0)
                beats += 1

        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            await generated(sequence, sampled(2))
            group.cancel_scope.cancel()
        assert beats > 20


async def test_a_shared_runtime_under_a_second_loop(opening: Open) -> None:
    """Opened under this loop, used under another one in another thread, closed here."""
    runtime: Runtime = await opening()
    sequence = runtime.sequence()
    sequence.append(prompt(9))
    made = await anyio.to_thread.run_sync(lambda: anyio.run(generated, sequence, sampled(4), backend="trio"))
    assert len(made) == 4
    assert len(await generated(sequence, sampled(4))) == 4
    await runtime.close()
