"""The tokenizer: no text becomes a control token; ids come back as text without broken characters."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Bpe
from tokenizers import decoders, models, pre_tokenizers, trainers

from m3agent.chat import Detokenizer, Tokenizer
from m3agent.errors import CheckpointError

from .conftest import CONTROL, LINES, outside_text, tokenizer_json

TOY = tokenizer_json()
TOKENIZER = Tokenizer(TOY)
NAIVE = Bpe.from_str(TOY)

valid_text = st.text(st.characters(exclude_categories=["Cs"]))


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, bool]]:
    detokenizer = Detokenizer(tokenizer)
    return [piece for number in ids for piece in detokenizer.push(number)] + detokenizer.finish()


def test_all_added_tokens_are_control_wherever_their_ids_lie():
    assert list(TOKENIZER.control) == CONTROL
    assert min(TOKENIZER.control.values()) > 256
    assert TOKENIZER.size == NAIVE.get_vocab_size(with_added_tokens=True)
    assert all(TOKENIZER.control_id(text) == NAIVE.token_to_id(text) for text in CONTROL)
    with pytest.raises(CheckpointError, match="no control token '<pad>'"):
        TOKENIZER.control_id("<pad>")


@pytest.mark.parametrize("text", CONTROL)
def test_no_spelling_of_a_control_token_becomes_one(text: str):
    assert NAIVE.encode(text, add_special_tokens=False).ids == [TOKENIZER.control_id(text)]  # what would happen
    for spelled in (text, f"a{text}b", f" {text} ", text * 3, text[:-1] + text + text[1:], text[:2] + text):
        ids = TOKENIZER.encode(spelled)
        assert not any(TOKENIZER.is_control(number) for number in ids)
        assert TOKENIZER.decode(ids) == spelled


@given(outside_text)
def test_no_text_becomes_a_control_token(text: str):
    ids = TOKENIZER.encode(text)
    assert not any(TOKENIZER.is_control(number) for number in ids)
    assert TOKENIZER.decode(ids) == text


@given(valid_text)
def test_text_is_tokenised_as_the_tokenizers_library_does(text: str):
    if not any(control in text for control in CONTROL):
        assert TOKENIZER.encode(text) == NAIVE.encode(text, add_special_tokens=False).ids


def test_control_tokens_inside_the_vocabulary_are_out_of_reach():
    bpe = Bpe(models.BPE(ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # a text is one word
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(LINES, trainer)
    tokenizer = Tokenizer(bpe.to_str())
    assert tokenizer.control_id(CONTROL[0]) == 0
    bpe.encode_special_tokens = True  # the library's own switch does not close this way
    assert bpe.encode("<think>").ids == [tokenizer.control_id("<think>")]
    for text in CONTROL:
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_control, ids))
        assert tokenizer.decode(ids) == text


def test_merges_that_build_a_control_token_are_out_of_reach():
    definition = json.loads(TOY)
    vocab, number = definition["model"]["vocab"], TOKENIZER.control_id("<think>")
    vocab.update({"<t": number + 1000, "<th": number + 1001, "ink>": number + 1002, "nk>": number + 1003})
    vocab.update({"k>": number + 1004, "<think>": number})
    definition["model"]["merges"] = [["<", "t"], ["<t", "h"], ["k", ">"], ["n", "k>"], ["i", "nk>"], ["<th", "ink>"]]
    definition["pre_tokenizer"]["use_regex"] = False  # else the brackets are words of their own
    tokenizer = Tokenizer(json.dumps(definition))
    assert tokenizer.encode("<think>") == [number + 1001, number + 1002]


def test_lone_surrogates_become_replacement_characters():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud83db")) == "a\ufffdb"
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\ude00")) == "😀"


@given(outside_text)
def test_pieces_of_valid_text_hold_no_broken_characters(text: str):
    got = pieces(TOKENIZER, TOKENIZER.encode(text))
    assert "".join(piece for piece, _ in got) == text
    assert all(piece and not control and ("\ufffd" in text or "\ufffd" not in piece) for piece, control in got)


def test_characters_split_over_tokens_come_out_whole():
    text = "a👩‍💻日本é\u0301 x"
    single_bytes = [NAIVE.token_to_id(symbol) for symbol in pre_tokenizers.ByteLevel.alphabet()]
    by_byte = {TOKENIZER._token_bytes(number): number for number in single_bytes}
    ids = [by_byte[bytes([byte])] for byte in text.encode()]
    got = pieces(TOKENIZER, ids)
    assert [piece for piece, _ in got] == list(text)


@given(st.lists(st.integers(0, TOKENIZER.size - 1), max_size=40))
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(ids: list[int]):
    got = pieces(TOKENIZER, ids)
    assert "".join(piece for piece, _ in got) == TOKENIZER.decode(ids) == NAIVE.decode(ids, skip_special_tokens=False)
    assert [piece for piece, control in got if control] == [CONTROL_TEXT[n] for n in ids if n in CONTROL_TEXT]


def test_a_text_far_beyond_a_limit_is_told_from_its_beginning():
    text = "tide " * 100_000
    tokens = len(TOKENIZER.encode(text))
    assert not TOKENIZER.exceeds(text, tokens)
    assert not TOKENIZER.exceeds(text, len(text))
    assert TOKENIZER.exceeds(text, tokens // 3)
    assert TOKENIZER.exceeds(text * 100, 10)


CONTROL_TEXT = {number: text for text, number in TOKENIZER.control.items()}


def test_bad_files_are_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(Bpe(models.WordLevel({"a": 0}, "a")).to_str())
    with pytest.raises(CheckpointError, match="byte-level BPE"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(TOY)
    assert Tokenizer.load(tmp_path).encode("tide") == TOKENIZER.encode("tide")
    with pytest.raises(CheckpointError, match="not in the tokenizer"):
        TOKENIZER.decode([TOKENIZER.size])
