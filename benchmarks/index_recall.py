"""Does the index branch select what attention looks at? Measured on long conversations, without selection."""

from __future__ import annotations

from pathlib import Path

import torch

from m3agent.chat.tokenizer import Tokenizer
from m3agent.kernels.norm import gemma_rms_norm
from m3agent.kernels.rope import rope_table
from m3agent.model.checkpoint import read_tensors
from training.config import CONFIG
from training.episodes import IMAGE_TOKENS, Layout, row
from training.net import Net, load_released
from training.scenes import HELD_OUT
from training.tokenizer import NANO

LENGTH = 2048  # tokens; 16 blocks, of which 8 are kept


@torch.no_grad()
def index_recall(model: str | None = None, conversations: int = 8) -> dict[str, float]:
    """Over the queries of the second half of each conversation, the share of full attention's mass that lies in the
    selected blocks; the same for the most that as many blocks could hold, and for the most recent ones."""
    folder = Path(model) if model else NANO
    net, layout = Net(CONFIG), Layout(Tokenizer.load(folder))
    load_released(net, read_tensors(folder))
    totals = {"selected blocks": 0.0, "best possible": 0.0, "most recent blocks": 0.0}
    count = 0
    for number in range(conversations):
        made = row(HELD_OUT + number, layout, LENGTH, 14, 6, None)
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        ids[0, : len(made.ids)] = torch.from_numpy(made.ids)
        slots = torch.cat([offset + torch.arange(IMAGE_TOKENS) for offset in made.offsets])
        pictures = torch.stack([torch.from_numpy(picture) for picture in made.pictures])
        queries = torch.arange(LENGTH // 2, len(made.ids), 7)
        for mass, kept in _layers(net, ids, pictures, slots, queries):
            recent = torch.arange(mass.shape[-1]) > (queries // 128)[:, None] - kept.shape[-1]
            totals["selected blocks"] += mass.gather(-1, kept).sum(-1).mean().item()
            totals["best possible"] += mass.topk(kept.shape[-1], dim=-1).values.sum(-1).mean().item()
            totals["most recent blocks"] += (mass * recent).sum(-1).mean().item()
            count += 1
    return {name: round(total / count, 4) for name, total in totals.items()}


def _layers(net: Net, ids: torch.Tensor, pictures: torch.Tensor, slots: torch.Tensor, queries: torch.Tensor):
    """For each sparse layer: attention mass by block [groups, queries, blocks] and the kept blocks' numbers."""
    c = net.config["text_config"]
    s = c["sparse_attention_config"]
    block = s["sparse_block_size"]
    cos, sin = rope_table(torch.arange(ids.shape[1]), c["rotary_dim"], c["rope_theta"])
    x = net.embed_rows(ids, pictures, slots)
    future = torch.arange(ids.shape[1]) > queries[:, None]
    own = queries[:, None] // block == torch.arange(ids.shape[1] // block)
    for layer in net.layers:
        if layer.sparse:
            normed = gemma_rms_norm(x, layer.norm1)
            q, k, _ = layer.project(normed, cos, sin)
            iq, ik = layer.index(normed, cos, sin)
            probe = q[0, queries].unflatten(1, (k.shape[2], -1)).float()  # [queries, groups, heads, d]
            logits = torch.einsum("qgrd,tgd->grqt", probe, k[0].float()) * q.shape[-1] ** -0.5
            mass = logits.masked_fill(future, -torch.inf).softmax(-1).mean(1)  # [groups, queries, keys]
            score = torch.einsum("qgd,td->gqt", iq[0, queries].float(), ik[0].float()).masked_fill(future, -torch.inf)
            score = score.unflatten(-1, (-1, block)).amax(-1).masked_fill(own, torch.inf)
            kept = score.topk(s["sparse_topk_blocks"], dim=-1).indices
            yield mass.unflatten(-1, (-1, block)).sum(-1), kept
        x = layer(x, cos, sin, queries[:1], True)[0]
