"""Triton's sparse and full attention against their torch meaning: on the GPU, or interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3agent.kernels import msa_launch as msa
from m3agent.kernels.attention import causal_attention
from m3agent.kernels.msa_launch import Choice, Paged
from m3agent.kernels.select import block_scores, select_blocks
from m3agent.kernels.sparse_attention import sparse_attention

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
NEAR = 1e-2 if GPU else 1e-5  # relative error of a whole output
BLOCK, D, HEADS, KV_HEADS = 16, 16, 8, 2
SCORE = {"rows": 16, "splits": 3, "warps": 4, "stages": 2, "pack": 4}
TOP = {"size": 2, "warps": 1}


class Case:
    """Sequences with shuffled pages; every slot that no token of theirs holds is poisoned."""

    def __init__(self, starts: list[int], n: int, seed: int = 0) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.starts, self.n = starts, n
        blocks = [-(-(start + n) // BLOCK) for start in starts]
        pages = sum(blocks) + 3
        order = torch.randperm(pages, generator=self.g)
        tables = torch.full((len(starts), max(blocks)), 0, dtype=torch.int64)
        self.k, self.v = self.rand(pages, BLOCK, KV_HEADS, D), self.rand(pages, BLOCK, KV_HEADS, D)
        self.ik = self.rand(pages, BLOCK, D)
        held = torch.zeros(pages, BLOCK, dtype=torch.bool)
        for b, count in enumerate(blocks):
            tables[b, :count], order = order[:count], order[count:]
            for j in range(count):
                held[tables[b, j], : starts[b] + n - j * BLOCK] = True
        for pool in (self.k, self.v, self.ik):
            pool[~held.to(DEVICE)] = 1e4  # finite: a masked weight of 0 times it must not show
        tokens = len(starts) * n
        self.q, self.iq = self.rand(tokens, HEADS, D), self.rand(tokens, KV_HEADS, D)
        self.tables = tables.to(DEVICE)
        self.paged = Paged(self.tables, torch.tensor(starts, device=DEVICE), max(starts) + n)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g).to(DTYPE).to(DEVICE)

    def span(self, b: int) -> tuple[slice, int, Tensor]:
        end = self.starts[b] + self.n
        return slice(b * self.n, (b + 1) * self.n), self.starts[b], self.tables[b, : -(-end // BLOCK)]

    def scores(self, b: int) -> Tensor:
        here, start, table = self.span(b)
        return block_scores(self.iq[here].double(), self.ik[table].flatten(0, 1)[: start + self.n], start, BLOCK)

    def choose(self, choice: Choice, count: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        scores = msa.score(self.iq, self.ik, self.paged, SCORE)
        return msa.top(scores, KV_HEADS, BLOCK, self.paged, choice, TOP, count)


CASES = [([100], 37), ([0], 1), ([0], 40), ([5, 130, 63, 64, 16], 1), ([15], 2)]


def near(out: Tensor, expected: Tensor) -> bool:
    return bool((out.double() - expected.double()).norm() <= NEAR * expected.double().norm())


@pytest.mark.parametrize(("starts", "n"), CASES)
def test_scores_of_whole_blocks(starts: list[int], n: int) -> None:
    case = Case(starts, n)
    scores = msa.score(case.iq, case.ik, case.paged, SCORE).view(len(starts) * n, KV_HEADS, -1)
    for b in range(len(starts)):
        here, start, _ = case.span(b)
        expected = case.scores(b)
        own = torch.arange(start, start + n, device=DEVICE) // BLOCK
        for i in range(n):
            ours = scores[here][i, :, : own[i]]
            assert torch.allclose(ours.double(), expected[i, :, : own[i]].double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("starts", "n"), CASES)
@pytest.mark.parametrize("choice", [Choice(3, 1, 0), Choice(4, 2, 1), Choice(1, 1, 0)])
def test_chosen_blocks(starts: list[int], n: int, choice: Choice) -> None:
    case = Case(starts, n)
    selected, counts, places = case.choose(choice, count=len(starts) == 1)
    for b in range(len(starts)):
        here, start, _ = case.span(b)
        expected = select_blocks(case.scores(b), start, BLOCK, choice.topk, choice.local, choice.initial)
        width = expected.shape[2]
        assert torch.equal(selected[here][..., :width].long(), expected)
        assert (selected[here][..., width:] == -1).all()
    if len(starts) == 1:
        blocks = counts.shape[0] // KV_HEADS
        for head in range(KV_HEADS):
            for block in range(blocks):
                took = places[:, head][selected[:, head] == block]
                assert sorted(took.tolist()) == list(range(int(counts[head * blocks + block])))


def test_ties_go_to_the_lower_block() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, -0.0, 2.0, 0.0, 1.0, 2.0]] * 2, device=DEVICE)
    paged = Paged(
        torch.zeros(1, 8, dtype=torch.int64, device=DEVICE), torch.tensor([7 * BLOCK], device=DEVICE), 8 * BLOCK
    )
    selected, _, _ = msa.top(scores, 2, BLOCK, paged, Choice(8, 1, 0), TOP)
    assert selected.tolist() == [[[7, 1, 2, 4, 0, 6, 3, 5]] * 2]


@pytest.mark.parametrize(("starts", "n"), CASES)
@pytest.mark.parametrize("splits", [1, 3])
def test_attention_by_query(starts: list[int], n: int, splits: int) -> None:
    case = Case(starts, n)
    selected, _, _ = case.choose(Choice(3, 1, 0))
    settings = {"splits": splits, "queries": 1, "stages": 2, "warps": 4}
    out = msa.by_query(case.q, case.k, case.v, case.paged, selected, settings)
    assert near(out, sparse(case, selected))


@pytest.mark.parametrize(("starts", "n"), [c for c in CASES if c[1] == 1])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_decoding(starts: list[int], n: int, splits: int) -> None:
    case = Case(starts, n)
    choice = Choice(3, 1, 0)
    settings = {"splits": splits, "size": 2, "stages": 2, "warps": 4}
    out = msa.decode(case.q, case.iq, case.k, case.v, case.ik, case.paged, choice, SCORE, settings)
    assert near(out, sparse(case, case.choose(choice)[0]))


@pytest.mark.parametrize(("starts", "n"), [c for c in CASES if len(c[0]) == 1])
def test_attention_by_block(starts: list[int], n: int) -> None:
    case = Case(starts, n)
    selected, counts, places = case.choose(Choice(3, 1, 0), count=True)
    settings = {"tile": 8, "queries": 4, "stages": 2, "warps": 4}
    out = msa.by_block(case.q, case.k, case.v, case.paged, selected, counts, places, settings)
    assert near(out, sparse(case, selected))


@pytest.mark.parametrize(("starts", "n"), CASES)
@pytest.mark.parametrize("splits", [1, 3])
def test_full_attention(starts: list[int], n: int, splits: int) -> None:
    case = Case(starts, n)
    settings = {"splits": splits, "queries": 4, "stages": 2, "warps": 4}
    out = msa.by_query(case.q, case.k, case.v, case.paged, None, settings)
    expected = torch.empty_like(case.q, dtype=torch.float64)
    for b in range(len(starts)):
        here, start, table = case.span(b)
        k, v = (x[table].flatten(0, 1)[: start + n].double() for x in (case.k, case.v))
        expected[here] = causal_attention(case.q[here].double(), k, v, start)
    assert near(out, expected)


def sparse(case: Case, selected: Tensor) -> Tensor:
    outs: list[Tensor] = []
    for b in range(len(case.starts)):
        here, start, table = case.span(b)
        q, k, v = case.q[here].double(), case.k.double(), case.v.double()
        outs.append(sparse_attention(q, k, v, table, selected[here].long(), start))
    return torch.cat(outs)
