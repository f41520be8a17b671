"""Random programs of append, generate, leave, cancel, fork, cut, close and forget, several at a time, on a small pool.

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
from m3agent.runtime.runtime import Opening
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


ACTIONS = ("open", "turn", "turn", "leave", "cancel", "logits", "fork", "cut", "close", "forget")
STEP = st.builds(Step, st.sampled_from(ACTIONS), st.integers(0, 99), st.integers(1, 40))


async def generate(branch: Branch, step: Step, runtime: Runtime) -> None:
    """Append some tokens and generate; a full pool is one of the outcomes."""
    new = random.Random(step.size % 2).choices(range(256), k=step.size % 29)
    branch.sequence.append(new)
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


async def run(rounds: list[list[Step]], opening: Opening, model: M3Model) -> None:
    async with opening as runtime:
        branches: list[Branch] = []
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
                    elif step.action == "logits":
                        group.start_soon(check, branch, model)
                    elif step.action in ("close", "forget"):
                        if step.action == "close":
                            branch.sequence.close()
                        branches[place] = Branch(runtime.sequence(), [])
                    else:
                        group.start_soon(generate, branch, step, runtime)
            assert runtime.stats().active_requests == 0
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


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_random_programs(backend: str, opening: Callable[..., Opening], model: M3Model) -> None:
    @settings(max_examples=30)
    @given(st.lists(st.lists(STEP, min_size=1, max_size=4), min_size=1, max_size=8))
    def programs(rounds: list[list[Step]]) -> None:
        anyio.run(run, rounds, opening(PAGES * 8), model, backend=backend)

    programs()
