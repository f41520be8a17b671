"""MiniMax-M3's arithmetic for training: whole rows at once, autograd, bf16 matrices over float32 weights.

The same function as `m3agent.model` (a test holds the two together), laid out for a training step: every expert
runs on every token in two large products and the router's zeros drop out, attention is causal over full rows,
and the index branch learns from a few sampled queries. `released_tensors` gives the weights their released names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m3agent.kernels.norm import gemma_rms_norm
from m3agent.kernels.rope import apply_rope, rope_table
from m3agent.kernels.swiglu import swiglu_oai


def fake_mxfp8(w: Tensor) -> Tensor:
    """What is left of w [..., n] after a round trip through MXFP8; the gradient passes as if nothing happened."""
    blocks = w.detach().float().unflatten(-1, (-1, 32))  # [..., n / 32, 32]
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448.0)))
    rounded = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return w + (rounded - w.detach())


class Text(nn.Module):
    """One decoder layer. `sparse` layers have an index branch, `moe` layers experts; M3 has both or neither."""

    def __init__(self, c: dict[str, Any], sparse: bool, moe: bool) -> None:
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        nq, nkv = c["num_attention_heads"], c["num_key_value_heads"]
        self.c, self.sparse, self.moe, self.quantized = c, sparse, moe, False
        self.norm1, self.norm2 = _offsets(h), _offsets(h)
        self.q, self.k, self.v = _matrix(nq * d, h), _matrix(nkv * d, h), _matrix(nkv * d, h)
        self.o = _matrix(h, nq * d, depth=c["num_hidden_layers"])
        self.q_norm, self.k_norm = _offsets(d), _offsets(d)
        if sparse:
            s = c["sparse_attention_config"]
            self.index_q = _matrix(s["sparse_num_index_heads"] * s["sparse_index_dim"], h)
            self.index_k = _matrix(s["sparse_index_dim"], h)
            self.index_q_norm, self.index_k_norm = _offsets(s["sparse_index_dim"]), _offsets(s["sparse_index_dim"])
        inner = c["shared_intermediate_size"] if moe else c["dense_intermediate_size"]
        self.gate, self.up = _matrix(inner, h), _matrix(inner, h)  # the dense MLP or the shared expert
        self.down = _matrix(h, inner, depth=c["num_hidden_layers"])
        if moe:
            e, i = c["num_local_experts"], c["intermediate_size"]
            self.router = _matrix(e, h)
            self.register_buffer("router_bias", torch.zeros(e))
            self.experts_gate, self.experts_up = _matrix(e, i, h), _matrix(e, i, h)
            self.experts_down = _matrix(e, h, i, depth=c["num_hidden_layers"])

    def weight(self, w: Tensor) -> Tensor:
        return (fake_mxfp8(w) if self.quantized else w).to(torch.bfloat16)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed, turned q [B, T, nq, d], k and v [B, T, nkv, d] of normed hidden states x [B, T, h]."""
        d, eps = self.c["head_dim"], self.c["rms_norm_eps"]
        fused = F.linear(x, self.weight(torch.cat((self.q, self.k, self.v))))
        q, k, v = (part.unflatten(-1, (-1, d)) for part in fused.split((len(self.q), len(self.k), len(self.v)), dim=-1))
        q = apply_rope(gemma_rms_norm(q, self.q_norm, eps), cos, sin)
        k = apply_rope(gemma_rms_norm(k, self.k_norm, eps), cos, sin)
        return q, k, v

    def index(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [B, T, ni, D] and the shared index key [B, T, D]."""
        dim, eps = self.c["sparse_attention_config"]["sparse_index_dim"], self.c["rms_norm_eps"]
        fused = F.linear(x, self.weight(torch.cat((self.index_q, self.index_k))))
        iq, ik = fused.split((len(self.index_q), len(self.index_k)), dim=-1)
        iq = apply_rope(gemma_rms_norm(iq.unflatten(-1, (-1, dim)), self.index_q_norm, eps), cos, sin)
        ik = apply_rope(gemma_rms_norm(ik.unsqueeze(-2), self.index_k_norm, eps), cos, sin).squeeze(-2)
        return iq, ik

    def mlp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, h] → (output [N, h], tokens a expert [E])."""
        alpha, limit = self.c["swiglu_alpha"], self.c["swiglu_limit"]
        gate, up = F.linear(x, self.weight(torch.cat((self.gate, self.up)))).chunk(2, dim=-1)
        out = F.linear(swiglu_oai(gate, up, alpha, limit), self.weight(self.down))
        if not self.moe:
            return out, x.new_zeros(0, dtype=torch.float32)
        e = self.c["num_local_experts"]
        score = torch.sigmoid(F.linear(x.float(), self.router))  # [N, E]
        chosen = (score.detach() + self.router_bias).topk(self.c["num_experts_per_tok"], dim=-1).indices
        mask = torch.zeros_like(score).scatter_(1, chosen, 1.0)
        share = score * mask
        share = share / share.sum(-1, keepdim=True) * self.c["routed_scaling_factor"]
        both = torch.cat((self.experts_gate.flatten(0, 1), self.experts_up.flatten(0, 1)))  # [2 E I, h]
        gate, up = F.linear(x, self.weight(both)).chunk(2, dim=-1)
        act = swiglu_oai(gate, up, alpha, limit).unflatten(-1, (e, -1)) * share.to(x.dtype).unsqueeze(-1)  # [N, E, I]
        down = self.weight(self.experts_down).permute(1, 0, 2).flatten(1)  # [h, E I]
        return out + F.linear(act.flatten(1), down), mask.sum(0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, probe: Tensor, select: bool) -> tuple[Tensor, ...]:
        """x [B, T, h], probe: query positions [P] at which the index branch is taught. → x, expert load, index loss."""
        normed = gemma_rms_norm(x, self.norm1, self.c["rms_norm_eps"])
        q, k, v = self.project(normed, cos, sin)
        index_loss, mask = x.new_zeros((), dtype=torch.float32), None
        if self.sparse:
            iq, ik = self.index(normed.detach(), cos, sin)
            index_loss = self.teach_index(q.detach(), k.detach(), iq, ik, probe)
            if select:
                mask = self.selection(iq.detach(), ik.detach()).repeat_interleave(q.shape[2] // iq.shape[2], dim=1)
        x = x + F.linear(_attend(q, k, v, mask).flatten(2), self.weight(self.o))
        out, load = self.mlp(gemma_rms_norm(x, self.norm2, self.c["rms_norm_eps"]).flatten(0, 1))
        return x + out.view_as(x), load, index_loss

    def teach_index(self, q: Tensor, k: Tensor, iq: Tensor, ik: Tensor, probe: Tensor) -> Tensor:
        """KL from the attention mass of each earlier block (mean over a group's heads) to the index branch's softmax.

        Only blocks before the query's own count, since that one is always taken. Source: the training recipe of
        MiniMax Sparse Attention, with the queries subsampled. The scale on the index scores does not change order.
        """
        block = self.c["sparse_attention_config"]["sparse_block_size"]
        group, length = q.shape[2] // k.shape[2], k.shape[1]
        probe_q = q[:, probe].unflatten(2, (-1, group))  # [B, P, nkv, group, d]
        logits = torch.einsum("bpgrd,btgd->bgrpt", probe_q, k).float() * q.shape[-1] ** -0.5
        future = torch.arange(length, device=q.device) > probe[:, None]  # [P, T]
        mass = logits.masked_fill(future, -math.inf).softmax(-1).mean(2)  # [B, nkv, P, T]
        mass = mass.unflatten(-1, (-1, block)).sum(-1)  # [B, nkv, P, blocks]
        score = torch.einsum("bpgd,btd->bgpt", iq[:, probe], ik).float() * iq.shape[-1] ** -0.5
        score = score.unflatten(-1, (-1, block)).amax(-1)  # [B, nkv, P, blocks]
        earlier = torch.arange(length // block, device=q.device) < (probe // block)[:, None]  # [P, blocks]
        teacher = mass * earlier
        teacher = teacher / teacher.sum(-1, keepdim=True).clamp(min=1e-9)
        log_student = score.masked_fill(~earlier, -1e30).log_softmax(-1)
        divergence = (teacher * (teacher.clamp(min=1e-9).log() - log_student)).masked_fill(~earlier, 0.0).sum(-1)
        return divergence.mean()

    def selection(self, iq: Tensor, ik: Tensor) -> Tensor:
        """Which keys each index head lets its group see: bool [B, ni, T, T], causal inside the own block."""
        s = self.c["sparse_attention_config"]
        block, length = s["sparse_block_size"], ik.shape[1]
        at = torch.arange(length, device=ik.device)
        score = torch.einsum("bqgd,btd->bgqt", iq.float(), ik.float())
        score = score.masked_fill(at > at[:, None], -math.inf).unflatten(-1, (-1, block)).amax(-1)
        own = at[:, None] // block == torch.arange(length // block, device=ik.device)  # [T, blocks]
        score = score.masked_fill(own, math.inf)
        kept = score.topk(min(s["sparse_topk_blocks"], score.shape[-1]), dim=-1).indices
        blocks = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, kept, True)
        return blocks.repeat_interleave(block, dim=-1) & (at <= at[:, None])


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, heads, d] in and out; causal when there is no mask."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


class Vision(nn.Module):
    """One layer of the vision tower: pre-LN attention inside a picture, GELU MLP, biases everywhere."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, self.heads, self.eps = c["hidden_size"], c["num_attention_heads"], c["layer_norm_eps"]
        self.norm1, self.norm2 = nn.LayerNorm(h, self.eps), nn.LayerNorm(h, self.eps)
        self.q, self.k, self.v = _matrix(h, h), _matrix(h, h), _matrix(h, h)
        self.out = _matrix(h, h, depth=c["num_hidden_layers"])
        self.fc1 = _matrix(c["intermediate_size"], h)
        self.fc2 = _matrix(h, c["intermediate_size"], depth=c["num_hidden_layers"])
        self.q_bias, self.k_bias, self.v_bias, self.out_bias = (_offsets(h) for _ in range(4))
        self.fc1_bias, self.fc2_bias = _offsets(c["intermediate_size"]), _offsets(h)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [pictures, patches, h]."""
        b = torch.bfloat16
        normed = F.layer_norm(x.float(), x.shape[-1:], self.norm1.weight, self.norm1.bias, self.eps).to(b)
        fused = F.linear(
            normed, torch.cat((self.q, self.k, self.v)).to(b), torch.cat((self.q_bias, self.k_bias, self.v_bias)).to(b)
        )
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in fused.chunk(3, dim=-1))
        q, k, v = (t.transpose(1, 2) for t in (apply_rope(q, cos, sin), apply_rope(k, cos, sin), v))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.linear(seen, self.out.to(b), self.out_bias.to(b))
        normed = F.layer_norm(x.float(), x.shape[-1:], self.norm2.weight, self.norm2.bias, self.eps).to(b)
        hidden = F.gelu(F.linear(normed, self.fc1.to(b), self.fc1_bias.to(b)))
        return x + F.linear(hidden, self.fc2.to(b), self.fc2_bias.to(b))


class Net(nn.Module):
    """The whole model for square pictures of one size, as m3-nano is trained."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        c, v, p = config["text_config"], config["vision_config"], config["projector_hidden_size"]
        h, hv = c["hidden_size"], v["hidden_size"]
        self.embed, self.head = nn.Parameter(torch.randn(c["vocab_size"], h) * 0.5), _matrix(c["vocab_size"], h)
        self.norm = _offsets(h)
        sparse = c["sparse_attention_config"]["sparse_attention_freq"]
        self.layers = nn.ModuleList(Text(c, bool(s), bool(m)) for s, m in zip(sparse, c["moe_layer_freq"], strict=True))
        self.patch = _matrix(hv, v["num_channels"] * 2 * v["patch_size"] ** 2)
        self.pre_norm = nn.LayerNorm(hv, v["layer_norm_eps"])
        self.vision = nn.ModuleList(Vision(v) for _ in range(v["num_hidden_layers"]))
        self.project1, self.project2 = _matrix(p, hv), _matrix(h, p)
        self.merge1, self.merge2 = _matrix(p, 4 * h), _matrix(h, p)
        self.project1_bias, self.merge1_bias = _offsets(p), _offsets(p)
        self.project2_bias, self.merge2_bias = _offsets(h), _offsets(h)

    def see(self, pictures: Tensor) -> Tensor:
        """uint8 [pictures, height, width, 3] → rows for the placeholders [pictures, tokens, h]."""
        v, b = self.config["vision_config"], torch.bfloat16
        cells, patch = pictures.shape[1] // (2 * v["patch_size"]), v["patch_size"]
        x = _patches(pictures, patch)  # [pictures, patches, 3 · 2 · patch²]
        x = F.linear(x.to(b), self.patch.to(b))
        x = F.layer_norm(x.float(), x.shape[-1:], self.pre_norm.weight, self.pre_norm.bias, self.pre_norm.eps).to(b)
        cos, sin = _grid_rope(cells, v, pictures.device)
        for layer in self.vision:
            x = layer(x, cos, sin)
        x = F.gelu(F.linear(x, self.project1.to(b), self.project1_bias.to(b)))
        x = F.linear(x, self.project2.to(b), self.project2_bias.to(b))
        x = x.unflatten(1, (-1, 4)).flatten(2)  # [pictures, tokens, 4 h]
        x = F.gelu(F.linear(x, self.merge1.to(b), self.merge1_bias.to(b)))
        return F.linear(x, self.merge2.to(b), self.merge2_bias.to(b))

    def embed_rows(self, ids: Tensor, pictures: Tensor, slots: Tensor) -> Tensor:
        """ids [B, T]; slots [pictures · tokens]: where each picture row goes in the flattened ids (B·T = nowhere)."""
        x = F.embedding(ids, self.embed).to(torch.bfloat16).flatten(0, 1)
        x = torch.cat((x, x.new_zeros(1, x.shape[-1])))  # one row more, for the padding pictures
        x = x.index_copy(0, slots, self.see(pictures).flatten(0, 1))
        return x[:-1].view(*ids.shape, -1)

    def forward(
        self, ids: Tensor, pictures: Tensor, slots: Tensor, probe: Tensor, select: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """→ final hidden states [B, T, h] before the head, expert loads [layers, E], index loss."""
        c = self.config["text_config"]
        cos, sin = rope_table(torch.arange(ids.shape[1], device=ids.device), c["rotary_dim"], c["rope_theta"])
        x = self.embed_rows(ids, pictures, slots)
        loads, index_loss = [], x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, load, loss = layer(x, cos, sin, probe, select)
            index_loss = index_loss + loss
            if layer.moe:
                loads.append(load)
        return gemma_rms_norm(x, self.norm, c["rms_norm_eps"]), torch.stack(loads), index_loss

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head.to(torch.bfloat16)).float()


def _matrix(*shape: int, depth: int = 0) -> nn.Parameter:
    """Normal with std 1/sqrt(fan in); what writes into the residual starts smaller by sqrt(2 · depth)."""
    std = shape[-1] ** -0.5 / (math.sqrt(2 * depth) if depth else 1.0)
    return nn.Parameter(torch.randn(*shape) * std)


def _offsets(n: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(n))


_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def _patches(pictures: Tensor, patch: int) -> Tensor:
    """uint8 [n, H, W, 3] → [n, patches, 3 · 2 · patch · patch] in M3's order: 2×2 cells, both time halves equal."""
    n, height, width, _ = pictures.shape
    mean, std = (torch.tensor(t, device=pictures.device) for t in (_MEAN, _STD))
    x = ((pictures.float() / 255 - mean) / std).to(torch.bfloat16)
    x = x.view(n, height // (2 * patch), 2, patch, width // (2 * patch), 2, patch, 3)
    x = x.permute(0, 1, 4, 2, 5, 7, 3, 6)  # [n, cell row, cell col, row, col, channel, y, x]
    x = x.unsqueeze(-3).expand(*x.shape[:-2], 2, patch, patch)
    return x.reshape(n, -1, 3 * 2 * patch * patch)


def _grid_rope(cells: int, v: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [patches, half] of a square still picture of cells × cells merged tokens."""
    half = (v["hidden_size"] // v["num_attention_heads"] // 3) // 2  # frequencies an axis
    at = torch.arange(cells, device=device)
    inner = torch.arange(2, device=device)
    y, x, dy, dx = torch.meshgrid(at, at, inner, inner, indexing="ij")
    frequencies = v["rope_theta"] ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    rows, columns = (2 * y + dy).flatten().float(), (2 * x + dx).flatten().float()
    angles = torch.cat(
        [torch.zeros_like(rows)[:, None] * frequencies, rows[:, None] * frequencies, columns[:, None] * frequencies], 1
    )
    return angles.cos(), angles.sin()


def released_tensors(net: Net) -> dict[str, Tensor]:
    """The weights under the names of the MiniMax-M3 release, float32 on the CPU."""
    return {name: tensor.detach().float().cpu().contiguous() for name, tensor in _by_released_name(net).items()}


@torch.no_grad()
def load_released(net: Net, tensors: Mapping[str, Tensor]) -> None:
    """Sets the weights from tensors of the released names; KeyError if one is missing."""
    for name, tensor in _by_released_name(net).items():
        tensor.copy_(tensors[name])


def _by_released_name(net: Net) -> dict[str, Tensor]:
    """Views of the parameters and buffers."""
    out: dict[str, Tensor] = {
        "language_model.model.embed_tokens.weight": net.embed,
        "language_model.lm_head.weight": net.head,
        "language_model.model.norm.weight": net.norm,
    }
    for i, layer in enumerate(net.layers):
        at = f"language_model.model.layers.{i}."
        names = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
        names |= {f"self_attn.{n}_proj": n for n in "qkvo"} | {
            "self_attn.q_norm": "q_norm",
            "self_attn.k_norm": "k_norm",
        }
        if layer.sparse:
            names |= {f"self_attn.index_{n}_proj": f"index_{n}" for n in "qk"}
            names |= {f"self_attn.index_{n}_norm": f"index_{n}_norm" for n in "qk"}
        mlp = "block_sparse_moe.shared_experts" if layer.moe else "mlp"
        names |= {f"{mlp}.{n}_proj": n for n in ("gate", "up", "down")}
        if layer.moe:
            names["block_sparse_moe.gate"] = "router"
            out[at + "block_sparse_moe.e_score_correction_bias"] = layer.router_bias
            for e in range(len(layer.experts_gate)):
                for released, ours in (("w1", "experts_gate"), ("w3", "experts_up"), ("w2", "experts_down")):
                    out[f"{at}block_sparse_moe.experts.{e}.{released}.weight"] = getattr(layer, ours)[e]
        out |= {f"{at}{released}.weight": getattr(layer, ours) for released, ours in names.items()}
    v = net.config["vision_config"]
    tower = "vision_tower.vision_model."
    patch_shape = (v["hidden_size"], v["num_channels"], 2, v["patch_size"], v["patch_size"])
    out[tower + "embeddings.patch_embedding.weight"] = net.patch.view(patch_shape)
    out |= {f"{tower}pre_layrnorm.{part}": getattr(net.pre_norm, part) for part in ("weight", "bias")}
    for i, layer in enumerate(net.vision):
        at = f"{tower}encoder.layers.{i}."
        for n in "12":
            out |= {
                f"{at}layer_norm{n}.{part}": getattr(getattr(layer, f"norm{n}"), part) for part in ("weight", "bias")
            }
        for ours in ("q", "k", "v", "out"):
            out[f"{at}self_attn.{ours}_proj.weight"] = getattr(layer, ours)
            out[f"{at}self_attn.{ours}_proj.bias"] = getattr(layer, ours + "_bias")
        for ours in ("fc1", "fc2"):
            out[f"{at}mlp.{ours}.weight"] = getattr(layer, ours)
            out[f"{at}mlp.{ours}.bias"] = getattr(layer, ours + "_bias")
    for module, ours in (("multi_modal_projector", "project"), ("patch_merge_mlp", "merge")):
        for n in "12":
            out[f"{module}.linear_{n}.weight"] = getattr(net, ours + n)
            out[f"{module}.linear_{n}.bias"] = getattr(net, f"{ours}{n}_bias")
    return out
