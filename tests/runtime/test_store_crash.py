"""Processes that are killed at any instant, and several at work on one folder: what was committed is served."""

import random
import subprocess
import sys
import time
from pathlib import Path

import anyio
import torch

from m3agent.model import M3Model
from m3agent.runtime import Runtime
from m3agent.runtime.kv.store import DiskStore
from tests.runtime.pages import check, key
from tests.runtime.test_sequence import generated, prompt, sampled
from tests.runtime.tiny import uncached_logits

WRITER = """
import os, sys
from itertools import count
from m3agent.runtime.kv.store import DiskStore
from tests.runtime.pages import put

store = DiskStore(sys.argv[1])
for number in count(int(sys.argv[2])):
    if put(store, number, number - 1):
        os.write(1, b"%d\\n" % number)
"""
FORKING = """
import os, signal, sys
import torch
import tests.runtime.pages
import m3agent.runtime.kv.store
for line in sys.stdin:  # a process that has imported everything makes the writers
    child = os.fork()
    if child == 0:
        sys.argv[1:] = line.split()
        exec(open(sys.argv[3]).read())
    os.write(1, b"pid %d\\n" % child)
"""
USERS = """
import os, random, sys
from m3agent.runtime.kv.store import DiskStore
from tests.runtime.pages import check, key, put

def use(folder, seed, limit):
    store, chance = DiskStore(folder, limit), random.Random(seed)
    for _ in range(250):
        number = chance.randrange(60)
        if chance.random() < 0.5:
            assert put(store, number, number - 1, 1 + number % 3), store.stat().last_failure
        elif (found := store.get(key(number))) is not None:
            check(found, number)
            store.touch([key(number)])
    put(store, 100 + seed)
    store.pin(f"user {seed}", [key(100 + seed)])
    stat = store.stat()
    assert (stat.damaged, stat.failed_writes, stat.last_failure) == (0, 0, None), stat
    assert stat.evicted > 10

for processes in (2, 4):
    children = []
    for seed in range(processes):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                use(sys.argv[1] + str(processes), seed, int(sys.argv[2]))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * processes
"""


def test_a_writer_killed_at_random_instants_loses_nothing_it_told(tmp_path: Path) -> None:
    """Forked from one parent, so that a round takes as long as the writer lives."""
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    folder, told, chance = tmp_path / "store", set[int](), random.Random(3)
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for life in range(40):
            parent.stdin.write(f"{folder} {life * 10_000} {script}\n")
            child = 0
            wanted = chance.choice((0, 1, 3, 20))
            lines = 0
            while not child or lines < wanted:
                line = parent.stdout.readline().split()
                if line[0] == "pid":
                    child = int(line[1])
                else:
                    told.add(int(line[0]))
                    lines += 1
            time.sleep(chance.random() * 0.004)  # the instant, not something to wait for
            subprocess.run(["kill", "-9", str(child)], check=True)
            store = DiskStore(folder)
            for number in told if life % 8 == 7 else list(told)[-30:]:
                check(store.get(key(number)), number)
            assert store.stat().damaged == 0
            store.close()
        parent.kill()
    store = DiskStore(folder)
    for number in told:
        check(store.get(key(number)), number)
    assert len(told) > 100
    store.verify()  # a file that was renamed and not entered is no fault
    assert store.verify() == []
    assert not list(folder.glob("pages/*/*.tmp"))


def test_processes_on_one_store_with_eviction(tmp_path: Path) -> None:
    limit = 40_000
    subprocess.run([sys.executable, "-c", USERS, str(tmp_path / "by"), str(limit)], check=True, timeout=50)
    for processes in (2, 4):
        store = DiskStore(tmp_path / f"by{processes}", limit)
        store.verify()  # the last one's page may have gone between its put and its pin
        assert store.stat().damaged == 0
        assert store.stat().names == [f"user {seed}" for seed in range(processes)]
        assert 0 < store.stat().size <= limit * (1 + processes / 16)
        for number in {found.hex() for found in store.keys()} & {key(number).hex() for number in range(60)}:  # noqa: SIM118
            assert store.get(bytes.fromhex(number)) is not None


GENERATING = """
import sys, anyio
from m3agent.runtime import Runtime
from tests.runtime.test_sequence import prompt, sampled

async def main():
    async with Runtime.open(sys.argv[1], cache_tokens=1024, disk_cache=sys.argv[2]) as runtime:
        first = runtime.sequence()
        first.append(prompt(203)[:200])
        await first.logits()
        first.append(prompt(203)[200:])
        async with first.generate(sampled(1)) as stream:
            async for token in stream:
                pass
        runtime.engine.cache.tiers.flush()
        sequence = first.fork()
        async with sequence.generate(sampled(500)) as stream:
            async for token in stream:
                print(token.id, flush=True)

anyio.run(main)
"""


def test_a_runtime_killed_while_it_generates_leaves_pages_for_the_next(
    checkpoint: Path, model: M3Model, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", GENERATING, str(checkpoint), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(20):
            assert child.stdout.readline()
        child.kill()
    assert child.returncode == -9

    async def run(folder: Path | None) -> tuple[list[int], torch.Tensor, int]:
        async with Runtime.open(checkpoint, cache_tokens=1024, disk_cache=folder or False) as runtime:
            sequence = runtime.sequence()
            sequence.append(prompt(203)[:200])
            if folder is None:
                await sequence.logits()  # the same chunks: all pages, then the rest
            sequence.append(prompt(203)[200:])
            tokens = [token.id for token in await generated(sequence, sampled(30))]
            logits = await sequence.logits()
            torch.testing.assert_close(logits, uncached_logits(model, sequence.tokens)[-1], rtol=0, atol=1e-5)
            return tokens, logits, runtime.stats().promoted_tokens

    tokens, logits, promoted = anyio.run(run, tmp_path)
    expected, expected_logits, _ = anyio.run(run, None)
    assert promoted >= 200
    assert tokens == expected
    assert torch.equal(logits, expected_logits)
    assert DiskStore(tmp_path).verify() == []
