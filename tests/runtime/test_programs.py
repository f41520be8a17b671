"""Random programs of append, generate, leave, cancel, fork, cut, save, restore, close and forget, several at a time, on
a small pool: as it is, with few calls at a time, with drafts at every step, and with a tier below that takes a part.

Prompts begin alike, so that sequences find each other's pages; their pages are taken for others and looked for again.
Whatever happened: every log is what the program saw, its logits are those of an uncached run, and in the end no page
is taken. Where no page was evicted, nothing that stayed in a log was computed twice.
"""

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3agent.errors import ContextOverflow
from m3agent.model import M3Model
from m3agent.runtime import Runtime, Sampling, Sequence
from m3agent.runtime.kv.layout import Payload
from m3agent.runtime.runtime import Opening
from tests.runtime.test_speculate import Always
from tests.runtime.tiny import uncached_logits

PAGES = 26


@dataclass
class Branch:
    """A sequence and the log that it should have."""

    sequence: Sequence
    log: list[int]


@dataclass
class Step:
    """What is done to one branch; `which` chooses it, `size` says how much."""

    action: str
    which: int
    size: int


ACTIONS = ("open", "turn", "turn", "leave", "cancel", "logits", "fork", "cut", "save", "restore", "close", "forget")
STEP = st.builds(Step, st.sampled_from(ACTIONS), st.integers(0, 99), st.integers(1, 40))


async def generate(branch: Branch, step: Step, runtime: Runtime) -> None:
    """Append some tokens and generate; a full pool is one of the outcomes."""
    new = random.Random(step.size % 2).choices(range(256), k=step.size % 29)
    branch.sequence.append(new)
    branch.sequence.priority = step.size % 3
    branch.log += new
    if not branch.log:
        return
    sampling = Sampling(seed=step.size, max_tokens=step.size, stop=frozenset())
    with anyio.CancelScope() as scope:
        async with branch.sequence.generate(sampling) as stream:
            try:
                async for token in stream:
                    branch.log.append(token.id)
                    if step.action == "leave" and token.id % 4 == 0:
                        break
                    if step.action == "cancel" and token.id % 4 == 0:
                        scope.cancel()
            except ContextOverflow:
                assert stream.finish == "error"
        if not runtime.stats().evicted_pages:
            assert stream.usage.recomputed_tokens <= (not new)  # see `Sequence.generate` on streams that were left


async def check(branch: Branch, model: M3Model) -> None:
    assert branch.sequence.tokens == branch.log
    if branch.log:
        try:
            logits = await branch.sequence.logits()
        except ContextOverflow:
            return
        torch.testing.assert_close(logits, uncached_logits(model, branch.log)[-1], rtol=0, atol=1e-5)


@dataclass
class File:
    """A sequence that was saved: its log, and the pages that it had."""

    log: list[int]
    pages: dict[bytes, Payload]


async def saved(branch: Branch) -> File:
    file = File(list(branch.log), {})
    while (page := await branch.sequence.page(len(file.pages))) is not None:
        file.pages[page[0]] = page[1]
    return file


async def restored(file: File, runtime: Runtime) -> Branch:
    sequence = runtime.sequence()
    sequence.append(file.log)
    cached = await sequence.adopt(file.pages.get)
    assert cached == sequence.cached_tokens <= max(0, len(file.log) - 1)
    return Branch(sequence, list(file.log))


async def run(rounds: list[list[Step]], opening: Opening, drafts: bool, model: M3Model) -> None:
    async with opening as runtime:
        if drafts:
            runtime.engine._steps._speculation = Always()
        branches: list[Branch] = []
        files: list[File] = []
        for steps in rounds:
            async with anyio.create_task_group() as group:
                busy: set[int] = set()
                for step in steps:
                    if step.action == "open" or not branches:
                        branches.append(Branch(runtime.sequence(), []))
                        continue
                    place = step.which % len(branches)
                    if place in busy:
                        continue
                    busy.add(place)
                    branch = branches[place]
                    if step.action == "fork":
                        branches.append(Branch(branch.sequence.fork(), list(branch.log)))
                    elif step.action == "cut":
                        keep = max(0, len(branch.log) - step.size)
                        branches.append(Branch(branch.sequence.fork(keep), branch.log[:keep]))
                    elif step.action == "save":
                        files.append(await saved(branch))
                    elif step.action == "restore":
                        if files:
                            branches.append(await restored(files[step.size % len(files)], runtime))
                    elif step.action == "logits":
                        group.start_soon(check, branch, model)
                    elif step.action in ("close", "forget"):
                        if step.action == "close":
                            branch.sequence.close()
                        branches[place] = Branch(runtime.sequence(), [])
                    else:
                        group.start_soon(generate, branch, step, runtime)
            assert (runtime.stats().active_requests, runtime.stats().waiting_requests) == (0, 0)
            held = {page for branch in branches for page in branch.sequence._table.pages}
            branch = step = None  # the loop's own references to what may be forgotten
            if runtime.stats().used_pages != len(held):
                gc.collect()  # slow, and needed only where a traceback holds a sequence
            assert runtime.stats().used_pages == len(held)
        for branch in branches:
            await check(branch, model)
        for branch in branches:
            branch.sequence.close()
        assert runtime.stats().used_pages == 0


KINDS = {"plain": {}, "few": {"max_active": 2}, "drafts": {}, "tiers": {"host_cache": 12 * 8 * 300}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_random_programs(backend: str, kind: str, opening_with: Callable[..., Opening], model: M3Model) -> None:
    @settings(max_examples=15)
    @given(st.lists(st.lists(STEP, min_size=1, max_size=4), min_size=1, max_size=8))
    def programs(rounds: list[list[Step]]) -> None:
        opening = opening_with(cache_tokens=PAGES * 8, **KINDS[kind])
        anyio.run(run, rounds, opening, kind == "drafts", model, backend=backend)

    programs()
