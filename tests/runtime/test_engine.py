"""The step loop: who is in a step, how a fault or a cancel of one request leaves the others, how it ends."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from m3agent.errors import RuntimeClosed, SessionBusy
from m3agent.model import M3Model, Span
from m3agent.runtime import Sampling, Sequence
from m3agent.runtime.kv import BlockTable
from m3agent.runtime.runtime import Opening
from m3agent.runtime.scheduler import CHUNK
from tests.runtime.test_sequence import NO_STOP, check_logits, generated, prompt, sampled
from tests.runtime.tiny import watch

pytestmark = pytest.mark.anyio
Open = Callable[..., Opening]


class Gate:
    """Holds the worker before a step until it is opened."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []  # per step: (start, tokens) of every span
        self.arrived, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, spans: list[Span]) -> None:
        self.steps.append([(span.start, len(span.ids)) for span in spans])
        self.arrived.release()
        assert self.open.acquire(timeout=20)

    async def reached(self) -> None:
        assert await anyio.to_thread.run_sync(lambda: self.arrived.acquire(timeout=20))


async def test_a_long_prompt_does_not_stall_decodes_and_prompts_take_turns(opening: Open) -> None:
    async with opening(8192) as runtime:
        steps: list[list[tuple[int, int]]] = []
        watch(runtime, lambda spans: steps.append([(span.start, len(span.ids)) for span in spans]))
        runtime.engine._steps.speculates = False
        short, first, second = runtime.sequence(), runtime.sequence(), runtime.sequence()
        short.append(prompt(3))
        first.append(prompt(2 * CHUNK + 10))
        second.append(prompt(2 * CHUNK + 20))
        async with short.generate(sampled(2000)) as stream:
            for _ in range(5):
                await anext(stream)
            async with anyio.create_task_group() as group:
                for sequence in (first, second):
                    group.start_soon(generated, sequence, sampled(1))
        mixed = [step for step in steps if len(step) > 1 and step[0][0] >= 4]
        assert len(mixed) > 10
        assert all(step[0][1] == 1 for step in mixed)  # the decode is in every one of them
        assert all(sum(tokens for _, tokens in step[1:]) <= CHUNK for step in mixed)
        places = [[start for start, _ in step[1:]] for step in mixed]
        ahead = {start for starts in places[:10] for start in starts}
        assert len(ahead) > 2  # neither of the two waits for the other one's end
        assert runtime.stats().recomputed_tokens == 0


async def test_alone_prompts_are_cut_at_the_chunk_and_take_turns(opening: Open) -> None:
    async with opening(8192) as runtime:
        gate = Gate()
        watch(runtime, gate)
        first, second = runtime.sequence(), runtime.sequence()
        first.append(prompt(2 * CHUNK + 10))
        second.append(prompt(CHUNK + 20))
        async with first.generate(sampled(1)), second.generate(sampled(1)):
            for _ in range(4):
                await gate.reached()
                gate.open.release()
            gate.open.release(9)
        assert gate.steps[0] == [(0, CHUNK)]
        assert sorted(gate.steps[1:3]) == [[(0, CHUNK)], [(CHUNK, CHUNK)]]
        assert sorted(gate.steps[3]) == [(CHUNK, 20), (2 * CHUNK, 10)]


async def test_a_later_prompt_is_cut_at_the_same_positions(opening: Open) -> None:
    async with opening(2048) as runtime:
        steps: list[tuple[int, int]] = []
        watch(runtime, lambda spans: steps.extend((span.start, len(span.ids)) for span in spans))
        sequence = runtime.sequence()
        for count in (CHUNK - 100, CHUNK):
            sequence.append(prompt(count))
            await sequence.logits()
        assert steps == [(0, CHUNK - 100), (CHUNK - 100, 100), (CHUNK, CHUNK - 100)]


async def test_a_cancel_takes_effect_after_the_running_step(opening: Open, model: M3Model) -> None:
    async with opening(4096) as runtime:
        gate = Gate()
        watch(runtime, gate)
        sequence = runtime.sequence()
        sequence.append(prompt(3 * CHUNK))
        with anyio.CancelScope() as scope:
            async with sequence.generate(sampled(5)) as cancelled:
                await gate.reached()
                scope.cancel()
                gate.open.release()
                await anyio.sleep_forever()
        assert len(gate.steps) == 1
        usage = cancelled.usage
        await anyio.sleep(0.001)
        assert cancelled.usage == usage  # the time, too, has stopped
        assert sequence.cached_tokens == CHUNK
        assert sequence.tokens == prompt(3 * CHUNK)
        assert runtime.stats().used_pages == CHUNK // 8
        gate.open.release(99)
        async with sequence.generate(sampled(2)) as stream:
            assert len([token async for token in stream]) == 2
        assert stream.usage.reused_tokens == CHUNK
        assert stream.usage.recomputed_tokens == 0
        await check_logits(sequence, model)


async def test_a_fork_while_a_dropped_stream_ends(
    opening: Open, model: M3Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker lets go between the sequence's look at it and the engine's: no fork may get the step's token."""
    async with opening() as runtime:
        gate = Gate()
        watch(runtime, gate)
        sequence = runtime.sequence()
        sequence.append(prompt(3))
        stream = sequence.generate(sampled(50))
        await stream.__aenter__()
        await gate.reached()
        gate.open.release()
        await gate.reached()  # the step after the prompt, whose token nobody took
        del stream
        gc.collect()

        def end_first(table: BlockTable) -> BlockTable:
            gate.open.release(99)
            while runtime.stats().active_requests:
                time.sleep(0.001)
            return fork(table)

        fork = runtime.engine.fork
        monkeypatch.setattr(runtime.engine, "fork", end_first)
        with pytest.raises(SessionBusy, match="dropped stream"):
            sequence.fork()
        gate.open.release(99)
        while runtime.stats().active_requests:
            await anyio.sleep(0.001)
        child = sequence.fork()
        child.append(prompt(4, 1))
        await check_logits(child, model)


async def test_a_fault_in_one_request_leaves_the_others(opening: Open) -> None:
    bad = 255

    def fail(spans: list[Span]) -> None:
        if any(bad in span.ids.tolist() for span in spans):
            raise ZeroDivisionError("a bad token")

    async with opening() as runtime:
        expected = runtime.sequence()
        expected.append([1, 2, 3])
        tokens = await generated(expected, Sampling(0.0, max_tokens=20, stop=NO_STOP))
        assert bad not in [token.id for token in tokens]
        watch(runtime, fail)
        results: list[list[int]] = []

        async def good() -> None:
            sequence = runtime.sequence()
            sequence.append([1, 2, 3])
            results.append([t.id for t in await generated(sequence, Sampling(0.0, max_tokens=20, stop=NO_STOP))])

        async def broken() -> None:
            sequence = runtime.sequence()
            sequence.append([5, bad])
            with pytest.raises(ZeroDivisionError, match="a bad token"):
                await generated(sequence, sampled(5))
            sequence.close()

        async with anyio.create_task_group() as group:
            for task in (good, broken, good, broken):
                group.start_soon(task)
        assert results == [[token.id for token in tokens]] * 2
        expected.close()
        assert runtime.stats().active_requests == 0


async def test_a_fault_of_the_engine_itself_reaches_every_reader(opening: Open) -> None:
    def crash(spans: list[Span]) -> None:
        raise SystemExit("the worker dies")

    async with opening() as runtime:
        watch(runtime, crash)
        sequence = runtime.sequence()
        sequence.append([1])
        with pytest.raises(RuntimeClosed, match="the worker dies"):
            await generated(sequence, sampled(1))
        with pytest.raises(RuntimeClosed):
            runtime.sequence()


async def test_closing_the_runtime_ends_running_streams(opening: Open) -> None:
    runtime = await opening()
    ended: list[Sequence] = []

    async def run() -> None:
        sequence = runtime.sequence()
        sequence.append(prompt(5))
        with pytest.raises(RuntimeClosed, match="runtime was closed"):
            await generated(sequence, sampled(2000))
        ended.append(sequence)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        group.start_soon(run)
        while runtime.stats().output_tokens < 10:
            await anyio.sleep(0.001)
        group.start_soon(runtime.close)
        await runtime.close()
    await runtime.close()
    assert len(ended) == 2
    assert not any(thread.name == "m3agent-engine" for thread in threading.enumerate())
    sequence = ended[0]
    with pytest.raises(RuntimeClosed):
        await generated(sequence, sampled(1))
    with pytest.raises(RuntimeClosed):
        sequence.fork()
    sequence.close()


EXIT = """
import sys, threading
import m3agent.runtime
assert threading.active_count() == 1, "a thread at import"
import anyio
from m3agent.runtime import Runtime, Sampling

async def main():
    runtime = await Runtime.open(sys.argv[1], cache_tokens=4096)
    sequence = runtime.sequence()
    sequence.append([1, 2, 3])
    stream = sequence.generate(Sampling(stop=frozenset()))
    await stream.__aenter__()
    await anext(stream)
    return runtime, sequence, stream

left = anyio.run(main)
print("bye")
"""


def test_the_interpreter_ends_with_an_unclosed_runtime_at_work(checkpoint: Path) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore::DeprecationWarning", "-c", EXIT]
    done = subprocess.run([*command, str(checkpoint)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")


FORK = """
import os, signal, sys
import anyio
from m3agent.errors import RuntimeClosed
from m3agent.runtime import Runtime, Sampling

async def main(runtime):
    sequence = runtime.sequence()
    sequence.append([1, 2, 3])
    async with sequence.generate(Sampling(max_tokens=1, stop=frozenset())) as stream:
        print(len([token async for token in stream]), flush=True)

async def opened():
    return await Runtime.open(sys.argv[1], cache_tokens=4096)

runtime = anyio.run(opened)
child = os.fork()
if child == 0:
    signal.alarm(30)
    try:
        anyio.run(main, runtime)
    except RuntimeClosed as error:
        print(error, flush=True)
    anyio.run(runtime.close)
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
anyio.run(main, runtime)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_told_instead_of_waiting_forever(checkpoint: Path) -> None:
    command = [sys.executable, "-c", FORK, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[1:] == ["0", "1"], done.stderr
    assert "open another one in here" in done.stdout.splitlines()[0]
