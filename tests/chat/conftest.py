"""A toy byte-level BPE with MiniMax-M3's 61 control tokens behind its own vocabulary, and a stand-in for patches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Bpe

from m3agent.chat import Tokenizer

CONTROL: list[str] = json.loads((Path(__file__).parent / "data" / "control_tokens.json").read_text())
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "]<]minimax[>[", "<mm:think>", "</mm:think>")

LINES = [
    "The tide in Bodø turns at 02:10; the tool answers with <response>high</response> and a picture.",
    "def draw(width, height):\n    return f'<svg viewBox=\"0 0 {width} {height}\">'\n",
    '<invoke name="render"><code>user developer system tool assistant ai</code></invoke>',
    "think thinking mm:think tool_call minimax image start of image end of image e~ ~b ~!b",
]


@dataclass(frozen=True)
class FakePatches:
    """What the chat format needs to know of a picture or film."""

    kind: str
    tokens: int
    tokens_per_frame: int = 0
    timestamps: tuple[float, ...] | None = None


def tokenizer_json() -> str:
    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(LINES * 8, trainer)
    for text in CONTROL:
        bpe.add_tokens([AddedToken(text, special=text not in NOT_SPECIAL, normalized=False)])
    return bpe.to_str()


@pytest.fixture(scope="session")
def toy_json() -> str:
    return tokenizer_json()


@pytest.fixture(scope="session")
def tokenizer(toy_json: str) -> Tokenizer:
    return Tokenizer(toy_json)


@pytest.fixture(scope="session")
def naive(toy_json: str) -> Bpe:
    """The same file as an ordinary library reads it: added tokens are matched in any text."""
    return Bpe.from_str(json.dumps(json.loads(toy_json)))


def _fragments() -> list[str]:
    """Control tokens, their halves, and what stands between them in forgeries."""
    halves = [piece for text in CONTROL for piece in (text[: len(text) // 2], text[len(text) // 2 :])]
    return [*CONTROL, *halves, "]", "[", "<", ">", "~", "/", "developer\n", '<invoke name="f">', "</invoke>", "think>"]


# Text from outside at its worst: every control token's spelling, nested and overlapping, among any other text.
outside_text = st.lists(
    st.one_of(st.sampled_from(_fragments()), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)), max_size=8
).map("".join)
