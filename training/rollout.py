"""The training model drawing on its own, many scenes at once: drafts to learn from, and quick scores on the way.

A plain cache of full rows and dense attention; the figures of the model card come from `m3agent` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.chat.messages import ChatMessage
from m3agent.chat.parse import CallDamaged, CallFinished, ReplyParser
from m3agent.chat.tokenizer import Tokenizer
from m3agent.kernels.norm import gemma_rms_norm
from m3agent.kernels.rope import rope_table
from training.episodes import (
    DRAW,
    IMAGE_TOKENS,
    INSTRUCTIONS,
    PICTURE,
    RENDER_TOOL,
    Layout,
    Task,
    differing,
    rasterise,
)
from training.net import Net

MAX_DRAFT = 260  # tokens of one turn; a scene of six shapes needs about 200


class Cache:
    """Keys and values of every layer for rows of up to `length` tokens, with where each row ends."""

    def __init__(self, net: Net, rows: int, length: int) -> None:
        c = net.config["text_config"]
        shape = (rows, length, c["num_key_value_heads"], c["head_dim"])
        device = net.embed.device
        self.k = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in net.layers]
        self.v = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in net.layers]
        self.ends = torch.zeros(rows, dtype=torch.long, device=device)


@torch.no_grad()
def extend(net: Net, cache: Cache, x: Tensor, lengths: Tensor) -> Tensor:
    """Appends embedded tokens x [B, L, h], of which row b has lengths[b]; logits after each row's last [B, vocab].

    What stands behind a row's length is written too, and overwritten by what comes next before anyone sees it.
    """
    c, (rows, count) = net.config["text_config"], x.shape[:2]
    at = cache.ends[:, None] + torch.arange(count, device=x.device)  # [B, L]
    at = at.clamp(max=cache.k[0].shape[1] - 1)
    cos, sin = rope_table(at.flatten(), c["rotary_dim"], c["rope_theta"])
    cos, sin = cos.view(rows, count, -1), sin.view(rows, count, -1)
    seen = torch.arange(cache.k[0].shape[1], device=x.device) <= at[..., None]  # [B, L, keys]
    row = torch.arange(rows, device=x.device)[:, None]
    group = c["num_attention_heads"] // c["num_key_value_heads"]
    for layer, keys, values in zip(net.layers, cache.k, cache.v, strict=True):
        q, k, v = layer.project(gemma_rms_norm(x, layer.norm1), cos, sin)
        keys[row, at], values[row, at] = k, v
        q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, nkv, group · L, d]
        mask = seen.repeat(1, group, 1)[:, None]  # [B, 1, group · L, keys]
        out = F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
        out = out.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4).flatten(2)  # [B, L, nq · d]
        x = x + F.linear(out, layer.weight(layer.o))
        x = x + layer.mlp(gemma_rms_norm(x, layer.norm2).flatten(0, 1))[0].view_as(x)
    cache.ends = cache.ends + lengths
    last = x[torch.arange(rows, device=x.device), lengths - 1]
    return net.logits(gemma_rms_norm(last, net.norm))


@torch.no_grad()
def write(net: Net, cache: Cache, logits: Tensor, end: int, temperature: float) -> list[list[int]]:
    """One turn of every row: token ids up to and with `end`, at most MAX_DRAFT."""
    rows = len(logits)
    done = torch.zeros(rows, dtype=torch.bool, device=logits.device)
    turns = []
    for step in range(MAX_DRAFT):
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
        else:
            token = logits.argmax(-1)
        token = torch.where(done, end, token)
        turns.append(token)
        fed = (~done).long()  # a row that has ended is fed nothing more
        done = done | (token == end)
        logits = extend(net, cache, F.embedding(token, net.embed).to(torch.bfloat16)[:, None], fed)
        if step % 8 == 7 and bool(done.all()):
            break
    written = torch.stack(turns, 1).tolist()
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in written]


def code_of(turn: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """The code of the turn's render call; None when it makes none, "" when the call is damaged."""
    parser, events = ReplyParser([RENDER_TOOL], "disabled"), []
    for control, run in groupby(turn, key=tokenizer.is_control):  # whole runs of text: the result is the same
        if control:
            events += [event for token in run for event in parser.feed(tokenizer.decode([token]), True)]
        else:
            events += parser.feed(tokenizer.decode(run), False)
    events += parser.finish()
    calls = [e for e in events if isinstance(e, CallFinished)]
    if calls:
        return str(calls[0].arguments.get("code", ""))
    return None if not any(isinstance(e, CallDamaged) for e in events) else ""


@dataclass
class Drawing:
    """What became of one scene: the code of each round and its share of differing pixels (1.0 if it failed)."""

    codes: list[str]
    misses: list[float]
    stopped: bool = False


def draw(
    net: Net, layout: Layout, targets: np.ndarray, rounds: int, temperature: float = 0.0, pool: Executor | None = None
) -> list[Drawing]:
    """Lets the model draw targets uint8 [B, H, W, 3]; after each round but the last it sees its renders."""
    device, rows = net.embed.device, len(targets)
    end = layout.control["[e~["]
    features = _see(net, targets)
    ids, _, media = layout.task(Task([ChatMessage("user", [DRAW[0], PICTURE])], []), INSTRUCTIONS[0], True, prompt=True)
    header = layout.header(INSTRUCTIONS[0], True)
    prompt = [*header, *ids]
    cache = Cache(net, rows, len(prompt) + rounds * (MAX_DRAFT + IMAGE_TOKENS + 24))
    x = F.embedding(torch.tensor(prompt, device=device), net.embed).to(torch.bfloat16).repeat(rows, 1, 1)
    at = len(header) + media[0]
    x[:, at : at + IMAGE_TOKENS] = features
    logits = extend(net, cache, x, torch.full((rows,), len(prompt), device=device))
    drawings = [Drawing([], []) for _ in range(rows)]
    for number in range(rounds):
        codes = [code_of(turn, layout.tokenizer) for turn in write(net, cache, logits, end, temperature)]
        renders = list((pool.map if pool else map)(_try_render, [code or "" for code in codes]))
        shown = np.zeros_like(targets)
        for i, (drawing, code) in enumerate(zip(drawings, codes, strict=True)):
            drawing.stopped = drawing.stopped or code is None
            if drawing.stopped:
                continue
            drawing.codes.append(code or "")
            drawing.misses.append(1.0 if renders[i] is None else differing(renders[i], targets[i]))
            if renders[i] is not None:
                shown[i] = renders[i]
        if number + 1 == rounds or all(d.stopped for d in drawings):
            break
        ids, media = _result(layout)
        x = F.embedding(torch.tensor(ids, device=device), net.embed).to(torch.bfloat16).repeat(rows, 1, 1)
        x[:, media : media + IMAGE_TOKENS] = _see(net, shown)
        logits = extend(net, cache, x, torch.full((rows,), len(ids), device=device))
    return drawings


def _result(layout: Layout) -> tuple[list[int], int]:
    """The tokens between a turn's end and the next turn when a render comes back, and where its picture goes."""
    from m3agent.chat.render import encode, render_next

    prompt = encode(render_next([ChatMessage("tool", [PICTURE])], "disabled"), layout.tokenizer)
    return prompt.ids, prompt.media[0][0]


@torch.no_grad()
def _see(net: Net, pictures: np.ndarray) -> Tensor:
    batches = torch.from_numpy(pictures).split(128)
    return torch.cat([net.see(batch.to(net.embed.device)) for batch in batches])


def _try_render(code: str) -> np.ndarray | None:
    try:
        return rasterise(code)
    except ValueError:
        return None
