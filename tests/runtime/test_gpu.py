"""m3-nano through the ordinary runtime on a GPU, beside the CPU; skipped where there is none."""

from __future__ import annotations

import random

import anyio
import numpy as np
import pytest
import torch

import m3agent as m3
from m3agent.model import KVPages, M3Model, Span, fused, load_model
from m3agent.runtime import Runtime, Sampling, Sequence
from m3agent.runtime.runtime import EMBEDDED

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def prompt(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


async def said(sequence: Sequence, count: int) -> list[int]:
    async with sequence.generate(Sampling(0.0, max_tokens=count, stop=frozenset())) as stream:
        return [token.id async for token in stream]


async def answers(runtime: Runtime) -> list[str]:
    """To a question, to a picture of a red disc, and to a question about it afterwards."""
    session = m3.Agent(runtime).session()
    y, x = np.mgrid[:112, :112]
    disc = np.where(((x - 56) ** 2 + (y - 56) ** 2 < 900)[..., None], (220, 30, 30), (255, 255, 255)).astype(np.uint8)
    replies = [
        await session.run(*parts, sampling=Sampling(0.0, max_tokens=40))
        for parts in (("Hello, who are you?",), ("Draw this picture.", m3.Image(disc)), ("Make it blue.",))
    ]
    assert replies[1].usage.media_tokens == 16
    assert replies[2].usage.recomputed_tokens == 0
    return [reply.text for reply in replies]


async def test_float32_says_what_the_cpu_says() -> None:
    async with Runtime.open(device="cpu", dtype=torch.float32, cache_tokens=8192) as runtime:
        expected = await answers(runtime)
        sequence = runtime.sequence()
        sequence.append(prompt(1500))
        tokens, logits = await said(sequence, 24), await sequence.logits()
    async with Runtime.open(device="cuda", dtype=torch.float32, cache_tokens=8192) as runtime:
        assert await answers(runtime) == expected
        sequence = runtime.sequence()
        sequence.append(prompt(1500))
        assert await said(sequence, 24) == tokens
        assert (await sequence.logits() - logits).norm() <= 1e-3 * logits.norm()


async def test_bfloat16_talks_like_the_cpu() -> None:
    async with Runtime.open(device="cuda", cache_tokens=8192) as runtime:
        assert (await answers(runtime))[0] == "I am m3-nano, a very small model. I draw pictures as SVG."


async def test_prefixes_forks_and_many_at_once() -> None:
    """Sequences that share 1,500 tokens and go on together, through graphs, come near to what each says alone."""
    async with Runtime.open(device="cuda", cache_tokens=65536) as runtime:
        first = runtime.sequence()
        first.append(prompt(1500))
        await said(first, 1)
        forks = [first.fork(1500) for _ in range(5)]
        for number, fork in enumerate(forks):
            fork.append(prompt(20 + number, seed=number))
        told: dict[int, list[int]] = {}

        async def go(number: int) -> None:
            told[number] = await said(forks[number], 16)

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(go, number)
        for fork in forks:
            alone = runtime.sequence()
            alone.append(fork.tokens)
            there, here = await fork.logits(), await alone.logits()
            assert (there - here).norm() <= 0.05 * here.norm()
            async with alone.generate(Sampling(0.0, max_tokens=1)) as stream:
                assert [token async for token in stream]
            alone.close()
        later = runtime.sequence()
        later.append([*prompt(1500), *prompt(9, seed=77)])
        async with later.generate(Sampling(0.0, max_tokens=2, stop=frozenset())) as stream:
            assert [token async for token in stream]
        assert stream.usage.reused_tokens >= 1500 // 128 * 128
        for sequence in (first, later, *forks):
            sequence.close()
        assert runtime.stats().used_pages == 0


@pytest.fixture(scope="module")
def model() -> M3Model:
    return load_model(EMBEDDED, device="cuda")


def test_the_fused_pass_and_its_graphs(model: M3Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk, an extension, and five decode steps of which the later ones are replayed, beside the plain pass."""
    found: dict[bool, list[torch.Tensor]] = {}
    ids = torch.tensor(prompt(1700))
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(fused, "supported", lambda *_: False)
        pages = KVPages.allocate(model.config, 40, model.dtype, "cuda")
        tables = [torch.randperm(40, generator=torch.Generator().manual_seed(2))[part : part + 14] for part in (0, 14)]
        outs: list[torch.Tensor] = []
        for begin, end in [(0, 1280), (1280, 1400), *((place, place + 1) for place in range(1400, 1405))]:
            spans = [Span(ids[begin:end], begin, table) for table in tables]
            outs += [out[-1].clone() for out in model.forward(spans, pages)]
        found[fast] = outs
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert (ours - theirs).norm() <= 0.08 * theirs.norm()


def test_a_graph_gives_what_its_first_step_gave(model: M3Model) -> None:
    pages = KVPages.allocate(model.config, 20, model.dtype, "cuda")
    table, ids = torch.arange(20).flip(0), torch.tensor(prompt(900))
    model.forward([Span(ids[:899], 0, table)], pages)
    first, second, third = (model.forward([Span(ids[899:], 899, table)], pages)[0].clone() for _ in range(3))
    assert model._graphs is not None
    assert model._graphs._graphs
    assert torch.equal(second, third)
    assert (first - second).norm() <= 0.02 * first.norm()
