"""A real runtime on a tiny checkpoint whose model says what a script says: everything but the words is real."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from m3agent.chat import ChatCall, ChatMessage, Tokenizer, encode, render
from m3agent.model import KVPages, M3Model, Span
from m3agent.runtime import Runtime
from tests.runtime.tiny import CONFIG, write_checkpoint


def write_rigged_checkpoint(folder: Path) -> Path:
    """The tiny checkpoint, with room for whole conversations in its byte tokens."""
    text = dataclasses.replace(CONFIG.text, max_position_embeddings=16384, block_size=128)
    return write_checkpoint(folder, dataclasses.replace(CONFIG, text=text))


def replies(tokenizer: Tokenizer, turns: Sequence[str | list[str]], tool: dict[str, Any]) -> list[int]:
    """The tokens of the model's turns: closing words, or the codes that the turn renders."""
    ids: list[int] = []
    for turn in turns:
        user = ChatMessage("user", ["x"])
        if isinstance(turn, str):
            said = ChatMessage("assistant", [turn])
        else:
            said = ChatMessage("assistant", [], None, [ChatCall("render", {"code": code}) for code in turn])
        before = encode(render([user], [tool], "disabled", True), tokenizer).ids
        whole = encode(render([user, said], [tool], "disabled", False), tokenizer).ids
        assert whole[: len(before)] == before
        end = whole.index(tokenizer.control_id("[e~["), len(before))
        ids += whole[len(before) : end + 1]
    return ids


class Rigged:
    """Computes every step, then puts the script's next token on top."""

    def __init__(self, model: M3Model, script: list[int]) -> None:
        self.model, self.script, self.said = model, script, 0
        self.device = model.device

    def forward(self, spans: list[Span], pages: KVPages, logits: Sequence[int]) -> list[torch.Tensor]:
        found = self.model.forward(spans, pages, logits)
        (span,) = spans
        for row in range(found[0].shape[0]):  # more than one where the engine checks drafted tokens
            if span.start and self.said < len(self.script) and int(span.ids[row]) == self.script[self.said]:
                self.said += 1  # the last token that was put on top has come back as input
            elif row:
                break  # a draft that is rejected, and so is all behind it
            found[0][row, self.script[min(self.said, len(self.script) - 1)]] = 1e4
        return found


def rig(runtime: Runtime, turns: Sequence[str | list[str]], tool: dict[str, Any]) -> None:
    steps = runtime.engine._steps
    steps.model = Rigged(steps.model, replies(runtime.tokenizer, turns, tool))
