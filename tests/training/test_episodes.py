"""Rows are what the library's own session would make of the same conversation."""

import json
from pathlib import Path

import numpy as np
import pytest

from m3agent.chat.tokenizer import Tokenizer
from m3agent.errors import RenderError
from m3agent.loops import SvgRenderer, render_tool
from training.episodes import (
    AGAIN,
    DONE,
    FIRST,
    IMAGE_TOKENS,
    NOTHING,
    RENDER_TOOL,
    WORDS,
    Drafts,
    Layout,
    rasterise,
    row,
)
from training.scenes import scene
from training.tokenizer import BPE_SIZE, CONTROL_TOKENS, NANO


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout(Tokenizer.load(NANO))


def test_the_tool_and_its_renderer_are_those_of_the_library() -> None:
    renderer = SvgRenderer((224, 224))
    assert render_tool(renderer).definition == RENDER_TOOL
    for seed in range(3):
        svg = scene(seed).svg()
        assert np.array_equal(renderer.render(svg).rgb, rasterise(svg))
    broken = scene(1).svg().replace("/>", ">", 1)
    with pytest.raises(RenderError) as ours:
        renderer.render(broken)
    with pytest.raises(ValueError, match="expected") as theirs:
        rasterise(broken)
    assert str(ours.value) == str(theirs.value)


def test_numbers_are_single_tokens_and_control_tokens_keep_their_order(layout: Layout) -> None:
    tokenizer = layout.tokenizer
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(257))
    assert [tokenizer.control_id(text) for text in CONTROL_TOKENS] == list(range(BPE_SIZE, BPE_SIZE + 61))


@pytest.mark.parametrize("seed", range(12))
def test_rows_hold_together(layout: Layout, seed: int) -> None:
    made = row(seed, layout, 2048, 14, 6, None)
    assert len(made.ids) == len(made.learn) <= 2048
    assert len(made.pictures) == len(made.offsets) <= 14
    placeholder = layout.tokenizer.control_id("]<]image[>[")
    at = np.flatnonzero(made.ids == placeholder)
    assert len(at) == IMAGE_TOKENS * len(made.offsets)
    assert at[::IMAGE_TOKENS].tolist() == made.offsets
    assert set(made.learn.tolist()) <= {NOTHING, FIRST, AGAIN, WORDS}
    assert not made.learn[at].any()  # pictures are read, not predicted
    # Whatever is learned as a whole is one turn of the model, up to its end token.
    turns = layout.tokenizer.decode(made.ids[made.learn != NOTHING].tolist()).split("[e~[")
    assert turns.pop() == ""
    assert DONE in turns
    for turn in turns:
        assert ("<invoke" in turn) == turn.endswith("]<]minimax[>[</tool_call>")


def test_own_drafts_are_shown_and_not_learned(layout: Layout, tmp_path: Path) -> None:
    draft = scene(5, 2).svg().replace("fill", "FILL", 1)
    (tmp_path / "drafts-0000001.json").write_text(json.dumps([[5, 2, [draft]]]))
    drafts = Drafts(tmp_path)
    drafts.refresh()
    assert drafts.pool == [(5, 2, [draft])]
    shown = 0
    for seed in range(6):
        made = row(seed, layout, 2048, 14, 2, drafts)
        text = layout.tokenizer.decode(made.ids.tolist())
        learned = layout.tokenizer.decode(made.ids[made.learn != NOTHING].tolist())
        shown += draft in text
        assert draft not in learned
    assert shown


def test_a_row_follows_from_its_seed(layout: Layout) -> None:
    one, other = (row(3, layout, 1024, 6, 4, None) for _ in range(2))
    assert one.ids.tolist() == other.ids.tolist()
