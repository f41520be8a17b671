"""Pictures in sequences: every placeholder gets its row, a picture is encoded once, and wrong counts are refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m3agent.errors import ConversationError
from m3agent.media.pixels import Patches, PixelSpec, image_patches, video_patches
from m3agent.model import KVPages, M3Model, Span
from m3agent.runtime.features import FeatureCache, place
from m3agent.runtime.runtime import Opening
from tests.runtime.test_sequence import generated, prompt, sampled
from tests.runtime.tiny import IMAGE, VIDEO

Open = Callable[..., Opening]
MARKS = {"image": IMAGE, "video": VIDEO}


def picture(seed: int, side: int = 112) -> Patches:
    rgb = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return image_patches(rgb, PixelSpec())


def film(frames: int) -> Patches:
    pictures = np.random.default_rng(0).integers(0, 256, (frames, 56, 56, 3), dtype=np.uint8)
    return video_patches(pictures, [float(n) for n in range(frames)], PixelSpec())


def blank(grids: list[tuple[int, int, int]], kind: str) -> Patches:
    rows = sum(t * h * w for t, h, w in grids)
    return Patches(torch.zeros(rows, 1), grids, f"{kind} {grids}", kind, None, rows // 4, 1)  # type: ignore[arg-type]


@given(
    items=st.lists(
        st.tuples(st.sampled_from(["image", "video"]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)),
        max_size=4,
    ),
    start=st.integers(0, 50),
)
def test_every_placeholder_has_its_row(items: list[tuple[str, int, int, int]], start: int) -> None:
    """A log is written item by item, films with text between frames, together with the row that each token wants."""
    ids: list[int] = []
    media: list[tuple[int, Patches]] = []
    wanted: dict[int, tuple[str, int, int]] = {}
    for kind, t, cells, text in items:
        grids = [(t, 2, 2 * cells)] * (2 if kind == "video" else 1)
        patches = blank(grids, kind)
        media.append((len(ids), patches))
        for grid in range(len(grids)):
            for row in range(t * cells):
                ids += [7] * (text if row % cells == 0 else 0)
                wanted[start + len(ids)] = (patches.digest, grid, row)
                ids.append(MARKS[kind])
        ids += [8] * text
    found = {
        run.start + n: (run.patches.digest, run.grid, run.row + n)
        for run in place(ids, start, media, MARKS, 2)
        for n in range(run.count)
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("ids", "media"),
    [
        ([IMAGE], []),
        ([1, IMAGE, 1], [(1, blank([(1, 2, 4)], "image"))]),
        ([VIDEO, VIDEO], [(0, blank([(1, 2, 4)], "image"))]),
        ([IMAGE] * 3, [(0, blank([(1, 2, 4)], "image"))]),
        ([IMAGE, 5, IMAGE, IMAGE], [(2, blank([(1, 2, 4)], "image"))]),
    ],
)
def test_tokens_without_rows_and_rows_without_tokens(ids: list[int], media: list[tuple[int, Patches]]) -> None:
    with pytest.raises(ConversationError):
        place(ids, 0, media, MARKS, 2)


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    encoded: list[int] = []

    def encode(pixels: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        encoded.append(grids[0][2])
        return torch.zeros(10)

    cache = FeatureCache(encode, limit=80)
    for width in (2, 4, 2, 6, 2, 4):
        cache.rows(blank([(1, 2, width)], "image"), 0)
    assert encoded == [2, 4, 6, 4]


@pytest.mark.anyio
async def test_pictures_and_films_give_the_logits_of_an_uncached_run(opening: Open, model: M3Model) -> None:
    """Two pictures and a film, one across a chunk's edge, in a log beyond the top-k blocks; each is encoded once."""
    large, small, clip = picture(1, 336), picture(2), film(10)
    text = prompt(440)
    frames = [token for _ in range(5) for token in (1, *[VIDEO] * 4)]
    first = [*text, *[IMAGE] * large.tokens, 2, *frames]
    second = [3, *[IMAGE] * small.tokens, 4, *[IMAGE] * large.tokens, 5]
    async with opening(2048) as runtime:
        encoded: list[int] = []
        features = runtime.engine._steps.features
        encode = features._encode
        features._encode = lambda pixels, grids: encoded.append(len(pixels)) or encode(pixels, grids)
        sequence = runtime.sequence()
        sequence.append(first, [(440, large), (441 + large.tokens, clip)])
        await generated(sequence, sampled(3))
        child = sequence.fork()
        for branch in (sequence, child):
            offset = len(branch)
            branch.append(second, [(1, small), (2 + small.tokens, large)])
            async with branch.generate(sampled(3)) as stream:
                assert len([token async for token in stream]) == 3
            assert stream.usage.media_tokens == small.tokens + large.tokens
            assert stream.usage.recomputed_tokens == 0
        assert sorted(encoded) == sorted([len(large.pixels), 4 * 16, 16, len(small.pixels)])

        rows = model.encode_media(clip.pixels, clip.grids)
        at = 441 + large.tokens
        media = [(440, model.encode_media(large.pixels, large.grids))]
        media += [(at + 5 * n + 1, rows[4 * n : 4 * n + 4]) for n in range(5)]
        media += [(offset + 1, model.encode_media(small.pixels, small.grids))]
        media += [(offset + 2 + small.tokens, model.encode_media(large.pixels, large.grids))]
        for branch in (sequence, child):
            ids = branch.tokens
            pages = KVPages.allocate(model.config, -(-len(ids) // 8))
            span = Span(torch.tensor(ids), 0, torch.arange(pages.pages), media)
            expected = model.forward([span], pages)[0][0]
            torch.testing.assert_close(await branch.logits(), expected, rtol=0, atol=1e-5)


@pytest.mark.anyio
async def test_a_picture_that_cannot_be_encoded_ends_its_request_alone(opening: Open) -> None:
    async with opening() as runtime:
        broken = blank([(1, 2, 4)], "image")  # rows of the wrong width
        sequence, other = runtime.sequence(), runtime.sequence()
        sequence.append([1, IMAGE, IMAGE], [(1, broken)])
        with pytest.raises(ValueError, match="pixels"):
            await generated(sequence, sampled(1))
        other.append([1])
        assert len(await generated(other, sampled(3))) == 3
        sequence.close()
        other.close()
        assert runtime.stats().used_pages == 0
