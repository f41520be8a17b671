"""Pages that leave the device come back from the host's memory and from the disk, in this process and in another."""

import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from pathlib import Path

import anyio
import pytest
import torch

from m3agent.model import M3Model
from m3agent.runtime import Runtime, Sequence
from m3agent.runtime.kv.store import DiskStore
from m3agent.runtime.kv.tiers import Deliver, Tiers
from m3agent.runtime.runtime import Opening
from tests.runtime.test_sequence import check_logits, generated, prompt, sampled
from tests.runtime.tiny import TEXT

pytestmark = pytest.mark.anyio
PAGE = TEXT.block_size
Open = Callable[..., Opening]


async def reused(sequence: Sequence, ids: list[int]) -> int:
    sequence.append(ids)
    async with sequence.generate(sampled(1)) as stream:
        async for _ in stream:
            pass
    return stream.usage.reused_tokens


async def fill(runtime: Runtime, seed: int) -> None:
    """Another conversation that takes all pages."""
    other = runtime.sequence()
    await reused(other, prompt(19 * PAGE, seed))
    other.close()


async def test_the_hosts_memory_keeps_what_leaves_the_device(checkpoint: Path, model: M3Model) -> None:
    async with Runtime.open(checkpoint, cache_tokens=20 * PAGE, host_cache=1 << 20) as runtime:
        sequence = runtime.sequence()
        await reused(sequence, prompt(150))
        for seed in (7, 8):
            await fill(runtime, seed)
        assert sequence.cached_tokens == 0
        assert runtime.stats().host_pages > 20
        async with sequence.generate(sampled(3)) as stream:
            assert len([token async for token in stream]) == 3
        assert stream.usage.reused_tokens >= 150 // PAGE * PAGE
        assert runtime.stats().promoted_tokens >= 150 // PAGE * PAGE
        await check_logits(sequence, model)


async def test_another_runtime_finds_the_pages_on_the_disk(checkpoint: Path, model: M3Model, tmp_path: Path) -> None:
    """Beyond the top-k blocks; once opened with the folder by one, twice at the same time by others."""
    ids = prompt(203)
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        first = runtime.sequence()
        assert await reused(first, ids) == 0
        expected = await first.logits()
    async with (
        Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as one,
        Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as two,
    ):
        for runtime in (one, two):
            sequence = runtime.sequence()
            assert await reused(sequence, ids) == 200
            assert runtime.stats().promoted_tokens == 200
            assert runtime.stats().recomputed_tokens == 0
            await check_logits(sequence, model)
            torch.testing.assert_close(await sequence.logits(), expected, rtol=0, atol=1e-5)


async def test_a_damaged_page_ends_what_is_found_and_is_computed_again(
    checkpoint: Path, model: M3Model, tmp_path: Path
) -> None:
    ids = prompt(203)
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        sequence = runtime.sequence()
        await reused(sequence, ids)
        key = sequence._table.keys[9]
    path = DiskStore(tmp_path)._path(key)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        sequence = runtime.sequence()
        assert await reused(sequence, ids) == 9 * PAGE
        await check_logits(sequence, model)
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        assert await reused(runtime.sequence(), ids) == 200  # it was written again


async def test_a_request_that_is_cancelled_while_its_pages_are_fetched(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        await reused(runtime.sequence(), prompt(203))
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        held: list[tuple[Sequence_[bytes], Deliver, Callable[[], bool]]] = []
        monkeypatch.setattr(Tiers, "fetch", lambda self, keys, deliver, gone: held.append((keys, deliver, gone)))
        sequence = runtime.sequence()
        sequence.append(prompt(203))

        async def deliver_late() -> None:
            while not held or not held[0][2]():
                await anyio.sleep(0.001)
            held[0][1]([], True)

        async with anyio.create_task_group() as group:
            group.start_soon(deliver_late)
            async with sequence.generate(sampled(3)) as stream:
                while not held:
                    await anyio.sleep(0.001)
        assert stream.finish == "cancelled"
        assert runtime.stats().active_requests == 0
        monkeypatch.undo()
        assert await reused(sequence, prompt(3)) == 200
    assert runtime.stats().used_pages == 0


async def test_the_disk_is_no_place_for_other_models(checkpoint: Path, tmp_path: Path) -> None:
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        await reused(runtime.sequence(), prompt(100))
    async with Runtime.open(checkpoint, dtype=torch.bfloat16, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        assert await reused(runtime.sequence(), prompt(100)) == 0


CHILD = """
import sys, anyio
from m3agent.runtime import Runtime
from tests.runtime.test_sequence import prompt
from tests.runtime.test_tiers import reused

async def main():
    async with Runtime.open(sys.argv[1], cache_tokens=1024, disk_cache=sys.argv[2]) as runtime:
        print(await reused(runtime.sequence(), prompt(100)), flush=True)
        runtime.engine.cache.tiers.flush()
        print("written", flush=True)
        sys.stdin.readline()

anyio.run(main)
"""


def test_what_a_killed_process_wrote_is_there(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(checkpoint), str(tmp_path)]
    for expected in ("0", "96"):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == expected
            assert child.stdout.readline().strip() == "written"
            child.kill()
    assert DiskStore(tmp_path).verify() == []
    assert DiskStore(tmp_path).stat().pages == 100 // PAGE


async def test_a_disk_that_cannot_be_written_is_no_fault(
    checkpoint: Path, model: M3Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=tmp_path) as runtime:
        tiers = runtime.engine.cache.tiers
        assert tiers is not None

        def full(path: Path, content: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("m3agent.runtime.kv.store._temporary", full)
        sequence = runtime.sequence()
        assert len(await generated_after(sequence, prompt(100))) == 3
        tiers.flush()
        assert tiers.disk is not None
        assert tiers.disk.stat().failed_writes == 100 // PAGE
        assert "No space left" in (tiers.disk.stat().last_failure or "")
        await check_logits(sequence, model)


async def generated_after(sequence: Sequence, ids: list[int]) -> list[int]:
    sequence.append(ids)
    return [token.id for token in await generated(sequence, sampled(3))]
