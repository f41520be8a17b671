"""m3-nano's tokenizer: a byte-level BPE of 1,984 entries, then MiniMax-M3's 61 added tokens in their order.

`python -m training.tokenizer` writes src/m3agent/nano/tokenizer.json. The one that was shipped is kept in the
repository: weights and tokenizer belong together, and the English part of the corpus is the docstrings of the
running Python's standard library.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.scenes import COLORS, scene

NANO = Path(__file__).parent.parent / "src" / "m3agent" / "nano"
BPE_SIZE = 1984

# MiniMax-M3's ids 200000 to 200060, in order.
CONTROL_TOKENS = (
    "]!p~[", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>", "<filename>", "<gh_stars>",
    "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>",
    "<jupyter_output>", "<empty_output>", "<commit_before>", "<commit_msg>", "<commit_after>", "]~b]", "[e~[", "]!d~[",
    "<function_call>", "<code_interpreter>", "]<]speech[>[", "]<]image[>[", "]<]video[>[", "]<]start of speech[>[",
    "]<]end of speech[>[", "]<]start of image[>[", "]<]end of image[>[", "]<]start of video[>[", "]<]end of video[>[",
    "]<]vision pad[>[", "]~!b[", "<jupyter_error>", "<add_file>", "<delete_file>", "<rename_file>", "<edit_file>",
    "<commit_message>", "<empty_source_file>", "<repo_struct>", "<code_context>", "<file_content>", "<source_files>",
    "<pr_start>", "<review_comment>", "<filepath>", "<file_sep>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "]<]frame[>[", "]<]start of frame[>[", "]<]end of frame[>[", "<|content_altered_placeholder|>", "]<]minimax[>[",
    "<mm:think>", "</mm:think>",
)  # fmt: skip
# These survive decoding with special tokens skipped, as in the release.
NOT_SPECIAL = {"<tool_call>", "</tool_call>", "]<]minimax[>[", "<mm:think>", "</mm:think>"}

# The pre-tokenizer's seven branches, as in o200k: two for words, then digits in groups of up to three,
# punctuation with its newlines, newlines, trailing spaces, spaces.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_ENGLISH = (
    "argparse", "asyncio", "calendar", "collections", "csv", "datetime", "decimal", "email.message", "fractions",
    "functools", "heapq", "html", "http.client", "itertools", "json", "logging", "math", "os", "pathlib", "random",
    "re", "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tempfile", "threading", "turtle",
    "typing", "unittest", "urllib.request", "uuid", "zipfile",
)  # fmt: skip


def corpus(texts: list[str]) -> Iterator[str]:
    """Scenes, numbers and colours often; the given fixed texts of the chat format; docstrings for English."""
    for seed in range(4000):
        yield scene(seed).svg()
    for number in range(1000):
        yield " ".join([str(number)] * (60 if number <= 256 else 6))
    for color in COLORS:
        yield f'{color} "{color} {color}. ' * 50
    for text in texts:
        yield from [text] * 40
    for name in _ENGLISH:
        module = importlib.import_module(name)
        yield inspect.getdoc(module) or ""
        for member in vars(module).values():
            if inspect.isclass(member) or inspect.isroutine(member):
                yield inspect.getdoc(member) or ""


def build(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(texts), trainer)
    if tokenizer.get_vocab_size() != BPE_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} entries, {BPE_SIZE} are wanted")
    tokenizer.add_tokens([AddedToken(t, special=t not in NOT_SPECIAL, normalized=False) for t in CONTROL_TOKENS])
    return tokenizer


def main() -> None:
    from training.episodes import fixed_texts

    NANO.mkdir(exist_ok=True)
    build(fixed_texts()).save(str(NANO / "tokenizer.json"))
    size = len(json.loads((NANO / "tokenizer.json").read_text())["added_tokens"])
    print(f"wrote {NANO / 'tokenizer.json'}: {BPE_SIZE} + {size} tokens")


if __name__ == "__main__":
    main()
