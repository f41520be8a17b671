"""Sequences that find each other's pages, give them up for others while idle, and give way while they generate."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch

from m3agent.errors import ContextOverflow
from m3agent.model import M3Config, M3Model, save_checkpoint
from m3agent.runtime import Runtime, Sequence
from m3agent.runtime.log import PIECE, TokenLog
from m3agent.runtime.runtime import Opening
from tests.runtime.test_features import picture
from tests.runtime.test_sequence import check_logits, generated, prompt, sampled
from tests.runtime.tiny import CONFIG, IMAGE, TEXT, random_tensors, write_checkpoint

pytestmark = pytest.mark.anyio
Open = Callable[..., Opening]
PAGE = TEXT.block_size


async def test_a_second_sequence_computes_only_what_is_its_own(opening: Open, model: M3Model) -> None:
    """Beyond the top-k blocks, so that index keys that did not come along would be seen."""
    assert TEXT.topk_blocks * PAGE < 100
    async with opening() as runtime:
        first, second = runtime.sequence(), runtime.sequence()
        first.append(prompt(203))
        await generated(first, sampled(3))
        second.append([*prompt(203)[:180], *prompt(20, 5)])
        async with second.generate(sampled(4)) as stream:
            assert len([token async for token in stream]) == 4
        assert stream.usage.reused_tokens == 180
        assert stream.usage.computed_tokens == 20
        assert runtime.stats().found_tokens == 180
        await check_logits(first, model)
        await check_logits(second, model)


async def test_what_a_closed_sequence_left_behind_is_found(opening: Open, model: M3Model) -> None:
    async with opening() as runtime:
        for turn in range(3):
            sequence = runtime.sequence()
            sequence.append(prompt(100))
            async with sequence.generate(sampled(2)) as stream:
                made = [token.id async for token in stream]
            assert stream.usage.reused_tokens == (99 if turn else 0)
            await check_logits(sequence, model)
            sequence.close()
        assert made
        assert runtime.stats().used_pages == 0
        assert runtime.stats().cached_pages > 0


async def test_pictures_count_by_content(opening: Open) -> None:
    """Two pictures of one size: the same one is found, the other one is not."""
    async with opening(2048) as runtime:

        async def reused(seed: int) -> int:
            patches = picture(seed)
            sequence = runtime.sequence()
            sequence.append([*prompt(PAGE), *[IMAGE] * patches.tokens, *prompt(20, 3)], [(PAGE, patches)])
            async with sequence.generate(sampled(1)) as stream:
                async for _ in stream:
                    pass
            return stream.usage.reused_tokens

        assert await reused(1) == 0
        assert await reused(2) == PAGE
        assert await reused(1) == PAGE + picture(1).tokens + 19


async def test_other_weights_have_other_keys(checkpoint: Path, tmp_path: Path) -> None:
    """One number of one tensor differs."""
    tensors = random_tensors(CONFIG)
    name = next(name for name in tensors if name.endswith("layers.1.self_attn.o_proj.weight"))
    tensors[name] = tensors[name].clone()
    tensors[name][5, 7] += 0.5
    write_checkpoint(tmp_path)
    save_checkpoint(tmp_path, CONFIG, tensors, dtype=torch.float32)
    assert M3Config.load(tmp_path) == M3Config.load(checkpoint)
    async with Runtime.open(checkpoint) as one, Runtime.open(tmp_path) as other:
        assert one.fingerprint != other.fingerprint
        assert one.sequence()._table.root != other.sequence()._table.root


async def test_idle_sequences_give_their_pages_and_go_on(opening: Open, model: M3Model) -> None:
    """Four conversations of 15 pages in a cache of 20."""
    async with opening(20 * PAGE) as runtime:
        talks = [runtime.sequence() for _ in range(4)]
        for turn in range(3):
            for number, talk in enumerate(talks):
                talk.append(prompt(35, 10 * number + turn))
                assert len(await generated(talk, sampled(5, turn))) == 5
        for talk in talks:
            await check_logits(talk, model)
        stats = runtime.stats()
        assert stats.evicted_pages > 0
        assert stats.preemptions == 0
        for talk in talks:
            talk.close()
        assert runtime.stats().used_pages == 0


async def test_running_sequences_give_way_and_go_on(opening: Open, model: M3Model) -> None:
    """Four that grow to 15 pages each, at once, in a cache of 20: the tokens are those of each one alone."""
    async with opening(60 * PAGE) as runtime:
        expected: list[list[int]] = []
        for number in range(4):
            alone = runtime.sequence()
            alone.append(prompt(20, number))
            expected.append([token.id for token in await generated(alone, sampled(100, number))])
    async with opening(20 * PAGE) as runtime:
        talks = [runtime.sequence() for _ in range(4)]
        made: dict[int, list[int]] = {}

        async def talk(number: int, sequence: Sequence) -> None:
            sequence.append(prompt(20, number))
            made[number] = [token.id for token in await generated(sequence, sampled(100, number))]

        async with anyio.create_task_group() as group:
            for number, sequence in enumerate(talks):
                group.start_soon(talk, number, sequence)
        assert [made[number] for number in range(4)] == expected
        assert runtime.stats().preemptions > 0
        for sequence in talks:
            await check_logits(sequence, model)


async def test_a_request_that_waits_for_pages_can_be_cancelled_and_closed(opening: Open) -> None:
    async with opening(20 * PAGE) as runtime:
        first, second, third = (runtime.sequence() for _ in range(3))
        for number, sequence in enumerate((first, second, third)):
            sequence.append(prompt(40, number))
        async with first.generate(sampled(110)) as stream, anyio.create_task_group() as group:
            await anext(stream)
            group.start_soon(generated, second, sampled(110))
            group.start_soon(generated, third, sampled(110))
            while runtime.stats().preemptions < 2:
                await anext(stream)
            group.cancel_scope.cancel()
        assert runtime.stats().active_requests == 0
        third.close()
        second.append(prompt(3))
        assert len(await generated(second, sampled(3))) == 3


async def test_one_sequence_that_needs_more_than_all_pages_is_told(opening: Open) -> None:
    async with opening(20 * PAGE) as runtime:
        other, large = runtime.sequence(), runtime.sequence()
        other.append(prompt(60, 1))
        await generated(other, sampled(3))
        large.append(prompt(100))
        with pytest.raises(ContextOverflow, match="KV cache is full"):
            await generated(large, sampled(100))
        assert len(large) == 20 * PAGE + 1
        other.append(prompt(3, 2))
        assert len(await generated(other, sampled(3))) == 3


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_token_logs_are_lists_that_forks_share(length: int) -> None:
    log = TokenLog()
    log.extend(range(length))
    for cut in {0, 1, length // 2, max(0, length - 1), length}:
        other = log.fork()
        other.cut(cut)
        other.append(-1)
        assert list(other) == [*[*range(length)][:cut], -1]
        assert other.last == -1
    assert list(log) == [*range(length)]
    assert len(log) == length
    assert log.last == (length - 1 if length else None)
    for start, end in ((0, length), (length // 3, length // 2), (length, length)):
        assert log.slice(start, end) == [*range(length)][start:end]
