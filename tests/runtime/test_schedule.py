"""Who runs, who waits, who is turned away; and what a step does when the memory is too small for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import torch

from m3agent.errors import ContextOverflow, Overloaded, RuntimeClosed
from m3agent.model import KVPages, M3Model, Span
from m3agent.runtime import Runtime, Sampling, Sequence
from m3agent.runtime.runtime import Opening
from m3agent.runtime.scheduler import CHUNK, PIECE, Pace, plan
from tests.runtime.test_engine import Gate
from tests.runtime.tiny import uncached_logits, watch

pytestmark = pytest.mark.anyio
Open = Callable[..., Opening]
NO_STOP = frozenset[int]()


def prompt(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(250), k=count)


def greedy(count: int) -> Sampling:
    return Sampling(0.0, max_tokens=count, stop=NO_STOP)


async def said(sequence: Sequence, count: int) -> list[int]:
    async with sequence.generate(greedy(count)) as stream:
        return [token.id async for token in stream]


def sequence_of(runtime: Runtime, tokens: list[int], priority: int = 0) -> Sequence:
    sequence = runtime.sequence()
    sequence.append(tokens)
    sequence.priority = priority
    return sequence


def calls(runtime: Runtime) -> int:
    """Those that run and those that wait."""
    stats = runtime.stats()
    return stats.active_requests + stats.waiting_requests


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not true():
            await anyio.sleep(0.001)


# The pace of prompts beside decodes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("each", "most"), [(0.1, 9), (0.01, 90), (2.0, 1)])
def test_the_pace_settles_where_a_step_takes_less_than_twice_a_plain_one(each: float, most: int) -> None:
    """plain: 1 s; each: seconds a prompt token adds."""
    pace = Pace()
    seen: list[int] = []
    for _ in range(200):
        tokens = pace.tokens(1.0)
        if tokens:
            seen.append(tokens)
            pace.learn(tokens, 1.0 + each * tokens, 1.0)
    assert 0.5 * most <= sum(seen[-50:]) / 50 <= most
    assert max(1.0 + each * tokens for tokens in seen[-50:]) <= max(2.0, 1 + each)


def test_plain_steps_are_timed_before_and_now_and_then() -> None:
    pace = Pace()
    assert pace.tokens(None) == 0
    taken = []
    for _ in range(100):
        taken.append(pace.tokens(1.0))
        if taken[-1]:
            pace.learn(taken[-1], 1.5, 1.0)
    assert taken.count(0) == 3


def test_steps_that_were_not_full_do_not_raise_the_pace() -> None:
    pace = Pace()
    before = pace.tokens(1.0)
    for _ in range(20):
        pace.learn(1, 1.0, 1.0)
    assert pace.tokens(1.0) == before


# Who comes first -----------------------------------------------------------------------------------------------------


async def test_prompts_of_higher_priority_are_computed_first(opening: Open) -> None:
    async with opening(8192) as runtime:
        gate = Gate()
        watch(runtime, gate)
        done: list[int] = []

        async def run(priority: int) -> None:
            await said(sequence_of(runtime, prompt(3 * CHUNK, priority), priority), 1)
            done.append(priority)

        async with anyio.create_task_group() as group:
            group.start_soon(said, sequence_of(runtime, prompt(CHUNK)), 1)
            await gate.reached()
            for priority in (0, -3, 7, 2):
                group.start_soon(run, priority)
            await until(lambda: calls(runtime) == 5)
            gate.open.release(99)
        assert done == [7, 2, 0, -3]


async def test_calls_beyond_max_active_wait_and_the_first_of_the_highest_priority_follows(opening_with: Open) -> None:
    async with opening_with(max_active=2) as runtime:
        gate = Gate()
        watch(runtime, gate)
        began: list[int] = []

        async def run(number: int, priority: int) -> None:
            async with sequence_of(runtime, prompt(5, number), priority).generate(greedy(3)) as stream:
                async for _ in stream:
                    if number not in began:
                        began.append(number)

        async with anyio.create_task_group() as group:
            for number, priority in enumerate((0, 0, 0, 5, 0)):
                group.start_soon(run, number, priority)
                await until(lambda number=number: calls(runtime) == number + 1)
            gate.open.release(999)
        assert began[2:] == [3, 2, 4]
        assert max(len(step) for step in gate.steps) == 2


async def test_calls_beyond_max_waiting_are_refused_at_once_and_nothing_is_lost(opening_with: Open) -> None:
    async with opening_with(max_active=1, max_waiting=1) as runtime:
        gate = Gate()
        watch(runtime, gate)
        refused = sequence_of(runtime, prompt(9))
        async with anyio.create_task_group() as group:
            group.start_soon(said, sequence_of(runtime, prompt(5)), 2)
            await gate.reached()
            group.start_soon(said, sequence_of(runtime, prompt(6)), 2)
            await until(lambda: calls(runtime) == 2)
            with pytest.raises(Overloaded, match="2 calls run or wait"):
                await said(refused, 2)
            gate.open.release(999)
        assert len(await said(refused, 2)) == 2  # later, there is room


async def test_a_waiting_call_can_be_cancelled_and_closed(opening_with: Open) -> None:
    async with opening_with(max_active=1) as runtime:
        gate = Gate()
        watch(runtime, gate)
        waits, closes = sequence_of(runtime, prompt(7)), sequence_of(runtime, prompt(8))
        async with anyio.create_task_group() as group:
            group.start_soon(said, sequence_of(runtime, prompt(5)), 4)
            await gate.reached()

            async def closed() -> None:
                with pytest.raises(RuntimeClosed):
                    await said(closes, 2)

            group.start_soon(closed)
            await until(lambda: calls(runtime) == 2)
            gate.open.release(999)
            with anyio.move_on_after(0):
                await said(waits, 2)
            closes.close()
        assert len(await said(waits, 2)) == 2
        assert calls(runtime) == 0


async def test_a_sequence_whose_logits_are_known_waits_like_the_others(opening_with: Open, model: M3Model) -> None:
    async with opening_with(max_active=1) as runtime:
        known = sequence_of(runtime, prompt(20))
        expected = int((await known.logits()).argmax())
        gate = Gate()
        watch(runtime, gate)
        answers: list[list[int]] = []

        async def run() -> None:
            answers.append(await said(known, 2))

        async with anyio.create_task_group() as group:
            group.start_soon(said, sequence_of(runtime, prompt(5)), 4)
            await gate.reached()
            group.start_soon(run)
            await until(lambda: calls(runtime) == 2)
            gate.open.release(999)
        assert answers[0][0] == expected


async def test_pages_of_calls_that_wait_serve_those_that_run(opening_with: Open, model: M3Model) -> None:
    async with opening_with(max_active=1, cache_tokens=320) as runtime:
        waiting = sequence_of(runtime, prompt(200))
        await waiting.logits()
        waiting.append(prompt(3))
        gate = Gate()
        watch(runtime, gate)
        async with anyio.create_task_group() as group:
            group.start_soon(said, sequence_of(runtime, prompt(50, 1)), 180)
            await gate.reached()
            group.start_soon(said, waiting, 3)
            await until(lambda: calls(runtime) == 2)
            gate.open.release(9999)
        tokens = waiting.tokens
        expected = uncached_logits(model, tokens)
        assert tokens[-3:] == expected[-4:-1].argmax(-1).tolist()


async def test_the_lower_priority_gives_its_pages(opening: Open) -> None:
    async with opening(cache_tokens=200) as runtime:
        runtime.engine._steps.speculates = False
        low, high = sequence_of(runtime, prompt(60), -1), sequence_of(runtime, prompt(60, 1), 1)
        ends: list[str] = []

        async def run(name: str, sequence: Sequence) -> None:
            await said(sequence, 100)
            ends.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(run, "low", low)
            await until(lambda: runtime.stats().output_tokens > 3)
            group.start_soon(run, "high", high)
        assert ends == ["high", "low"]
        assert runtime.stats().preemptions


@pytest.mark.parametrize("wrong", [{"max_active": 0}, {"max_waiting": 1}, {"max_active": 1, "max_waiting": -1}])
def test_numbers_that_make_no_sense(checkpoint: object, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_"):
        Runtime.open(checkpoint, **wrong)  # type: ignore[arg-type]


# Shutting down -------------------------------------------------------------------------------------------------------


async def test_closing_with_drain_lets_calls_end_and_takes_no_new_ones(opening: Open) -> None:
    async with opening() as runtime:
        gate = Gate()
        watch(runtime, gate)
        answers: list[int] = []

        async def run() -> None:
            answers.append(len(await said(sequence_of(runtime, prompt(5)), 12)))

        late = sequence_of(runtime, prompt(6))
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await gate.reached()
            group.start_soon(runtime.close, None)
            await until(lambda: runtime.closed)
            with pytest.raises(RuntimeClosed):
                await said(late, 1)
            gate.open.release(999)
        assert answers == [12]
        assert runtime.stats().used_pages == 0


async def test_draining_ends_with_its_time(opening: Open) -> None:
    async with opening() as runtime:
        watch(runtime, lambda spans: time.sleep(0.005))

        async def run() -> None:
            with pytest.raises(RuntimeClosed):
                await said(sequence_of(runtime, prompt(5)), 1900)

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await until(lambda: runtime.stats().output_tokens > 2)
            with anyio.fail_after(5):
                await runtime.close(drain=0.05)


# A memory that is too small ------------------------------------------------------------------------------------------


class Small:
    """Cannot compute more than `rows` at a time."""

    def __init__(self, model: M3Model, rows: int, error: Exception) -> None:
        self.model, self.rows, self.error = model, rows, error
        self.device = model.device

    def forward(self, spans: list[Span], pages: KVPages, logits: list[int]) -> list[torch.Tensor]:
        if sum(len(span.ids) for span in spans) > self.rows:
            raise self.error
        return self.model.forward(spans, pages, logits)


OUT = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("error", OUT, ids=["gpu", "cpu"])
async def test_a_step_that_does_not_fit_is_done_in_pieces(opening: Open, model: M3Model, error: Exception) -> None:
    async with opening(2048) as runtime:
        steps = runtime.engine._steps
        steps.model = Small(steps.model, 40, error)
        sequences = [sequence_of(runtime, prompt(n, n)) for n in (300, 9, 41)]
        async with anyio.create_task_group() as group:
            for sequence in sequences:
                group.start_soon(said, sequence, 5)
        for sequence in sequences:
            expected = uncached_logits(model, sequence.tokens)[-6:-1].argmax(-1).tolist()
            assert sequence.tokens[-5:] == expected


async def test_many_decodes_that_do_not_fit_together_are_computed_alone(opening: Open) -> None:
    async with opening(2048) as runtime:
        steps = runtime.engine._steps
        steps.model = Small(steps.model, 9, OUT[0])
        sequences = [sequence_of(runtime, prompt(7, n)) for n in range(12)]
        async with anyio.create_task_group() as group:
            for sequence in sequences:
                group.start_soon(said, sequence, 5)
        assert [len(sequence) for sequence in sequences] == [12] * 12


async def test_one_token_that_does_not_fit_ends_its_call_alone(opening: Open) -> None:
    async with opening() as runtime:
        steps = runtime.engine._steps
        steps.model = Small(steps.model, 0, OUT[0])
        with pytest.raises(torch.OutOfMemoryError):
            await said(sequence_of(runtime, prompt(9)), 1)
        steps.model = steps.model.model
        assert len(await said(sequence_of(runtime, prompt(9)), 3)) == 3


@pytest.mark.parametrize("seed", range(4))
async def test_faults_at_random_steps_end_nobody_else(opening: Open, model: M3Model, seed: int) -> None:
    """Every call ends with its own right tokens or with the fault; afterwards all pages are free."""
    luck = random.Random(seed)
    faults = [OUT[0], ZeroDivisionError("a fault"), MemoryError()]

    def fail(spans: list[Span]) -> None:
        if luck.random() < 0.08:
            raise luck.choice(faults)

    async with opening(512) as runtime:
        watch(runtime, fail)
        right = wrong = 0

        async def run(number: int) -> None:
            nonlocal right, wrong
            sequence = sequence_of(runtime, prompt(luck.randint(1, 120), number), luck.randint(-1, 1))
            try:
                answer = await said(sequence, luck.randint(1, 40))
            except (ZeroDivisionError, MemoryError, torch.OutOfMemoryError, ContextOverflow):
                wrong += 1
            else:
                right += 1
                expected = uncached_logits(model, sequence.tokens)[-len(answer) - 1 : -1].argmax(-1).tolist()
                assert answer == expected
            sequence.close()

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(run, number)
        assert right + wrong == 12
        assert right
        stats = runtime.stats()
        assert (stats.used_pages, stats.active_requests) == (0, 0)


# What a step is made of ----------------------------------------------------------------------------------------------


@dataclass
class Table:
    cached: int = 0


@dataclass
class Prompt:
    """As much of a request as the plan looks at."""

    pending: list[int]
    computed: int = 0
    priority: int = 0
    table: Table = field(default_factory=Table)


def counts(work: list[Any]) -> list[int]:
    return [piece.count for piece in work]


def test_a_short_prompt_comes_in_larger_pieces_than_a_long_one() -> None:
    decode, short, long = Prompt([1]), Prompt([1] * 300), Prompt([1] * 5000)
    rest = Prompt([1] * 500, computed=4500)  # the end of a long one is no short one
    assert counts(plan([decode, short], CHUNK, 3)) == [1, PIECE]  # type: ignore[list-item]
    assert counts(plan([decode, long], CHUNK, 3)) == [1, 3]  # type: ignore[list-item]
    assert counts(plan([decode, rest], CHUNK, 3)) == [1, 3]  # type: ignore[list-item]
    assert counts(plan([decode, short, Prompt([1] * 300)], CHUNK, 3)) == [1, PIECE]  # type: ignore[list-item]
    assert counts(plan([decode, short], CHUNK, 200)) == [1, 200]  # type: ignore[list-item]
    assert counts(plan([decode, short, long], CHUNK, 0)) == [1]  # type: ignore[list-item]
    assert counts(plan([Prompt([1] * 300)], CHUNK, 3)) == [CHUNK]  # type: ignore[list-item]


def test_who_got_tokens_stands_behind_the_others_the_next_time() -> None:
    decode, first, second = Prompt([1]), Prompt([1] * 5000), Prompt([2] * 5000)
    active = [decode, first, second]
    assert plan(active, CHUNK, 3)[1].request is first  # type: ignore[arg-type]
    assert plan(active, CHUNK, 3)[1].request is second  # type: ignore[arg-type]
    high = Prompt([3] * 5000, priority=1)
    active.append(high)
    assert plan(active, CHUNK, 3)[1].request is high  # type: ignore[arg-type]
    assert plan(active, CHUNK, 3)[1].request is high  # type: ignore[arg-type]
