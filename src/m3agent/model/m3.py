"""A MiniMax-M3 model: the weights and the two passes over them, tokens to logits and pixels to embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.kernels.linear import linear
from m3agent.kernels.norm_rope import paired_rope_table
from m3agent.model import fused
from m3agent.model.batch import Span, place, place_media, wanted_rows
from m3agent.model.config import M3Config
from m3agent.model.decode import decode_token
from m3agent.model.graphs import DecodeGraphs
from m3agent.model.pages import KVPages
from m3agent.model.text import decoder_layer, gained_norm
from m3agent.model.vision import Grid, encode_patches
from m3agent.model.weights import activation_dtype, build_weights


class M3Model:
    """Weights on one device in one dtype. It holds no state of any conversation: that is all in the pages.

    `tensors` maps released names to tensors (see `released_tensors`); they are copied. Raises CheckpointError for a
    missing, extra or misshapen one. `dtype` is the weights'; the attribute `dtype` is that of activations and pages.
    They differ in one case: float16 weights on the CPU compute in float32. Weights of bfloat16 and MXFP8 checkpoints
    fit into float16 to within 2^-25, and a decoded token reads half the bytes (see `kernels.linear`).
    `fingerprint` is a hex digest of the config, the weights' dtype and contents.
    """

    def __init__(
        self,
        config: M3Config,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = activation_dtype(dtype, self.device)
        self.weights = build_weights(config, tensors, dtype, self.device)
        self.fingerprint = self.weights.fingerprint
        self._rope: tuple[Tensor, Tensor] = self._rope_table(1024)
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def forward(
        self, spans: list[Span], pages: KVPages, logits: Literal["last", "all"] | Sequence[int] = "last"
    ) -> list[Tensor]:
        """Run the spans as one ragged batch; their keys and values are in the pages afterwards.

        Returns float32 logits for each span: [1, vocab] of its last token, [n, vocab] of all, or, with a number for
        each span, of so many of its last tokens. Raises ValueError
        for a span that its page table cannot hold or whose media rows do not fit.
        """
        t, w = self.config.text, self.weights
        if fused.supported(w, t, pages):
            return self._forward_fused(spans, pages, logits)
        spans = [span.to(self.device) for span in spans]
        batch = place(spans, pages)
        x = F.embedding(spans[0].ids if len(spans) == 1 else torch.cat([span.ids for span in spans]), w.embed).to(
            self.dtype
        )
        place_media(x, spans)
        rope = self._rope_rows(spans)
        if x.shape[0] == 1 and x.dtype is torch.float32 and x.device.type == "cpu":
            return [decode_token(x, w, t, rope, batch, pages)]
        for layer, layer_weights in enumerate(w.layers):
            x = decoder_layer(x, layer_weights, layer, t, rope, batch, pages)
        rows, places = wanted_rows(spans, logits)
        if x.shape[0] > sum(rows):
            x = x[torch.tensor(places, device=x.device)]
        out = linear(gained_norm(x, w.norm, t.rms_norm_eps), w.head).float()
        return list(out.split(rows))

    def _forward_fused(self, spans: list[Span], pages: KVPages, logits: str | Sequence[int]) -> list[Tensor]:
        """The same on a GPU, where decode steps are replayed."""
        t, w = self.config.text, self.weights
        self._reach(max(span.end for span in spans))
        if self._graphs is None or self._graphs.pages is not pages or self._graphs.rope is not self._rope:
            self._graphs = DecodeGraphs(w, t, self._rope, pages)
        if (out := self._graphs.logits(spans)) is not None:
            return list(out.split(1))
        inputs = fused.place_on_device(spans, pages.block_size, self.device)
        x = F.embedding(inputs.ids, w.embed)
        place_media(x, spans)
        x, delta = fused.hidden_states(x, inputs, w, t, self._rope, pages)
        rows, places = wanted_rows(spans, logits)
        if x.shape[0] > sum(rows):
            index = torch.tensor(places, pin_memory=x.is_cuda).to(x.device, non_blocking=True)
            x, delta = x[index], delta[index]
        return list(fused.head_logits(x, delta, w, t).split(rows))

    @torch.inference_mode()
    def encode_media(self, pixels: Tensor, grids: list[Grid]) -> Tensor:
        """Patch rows of images or of one film, [patches, 1176], and their (t, h, w) grids → [patches / 4, hidden].

        Every grid is a segment of its own. Raises ValueError if rows and grids disagree or the model has no eyes.
        """
        vision, weights = self.config.vision, self.weights.vision
        if vision is None or weights is None:
            raise ValueError("this checkpoint has no vision tower")
        merge = vision.spatial_merge_size
        for t, h, w in grids:
            if t < 1 or h < 1 or w < 1 or h % merge or w % merge:
                raise ValueError(f"grid {(t, h, w)}: rows and columns must be positive multiples of {merge}")
        patches = sum(t * h * w for t, h, w in grids)
        if tuple(pixels.shape) != (patches, vision.patch_channels):
            raise ValueError(f"pixels are {list(pixels.shape)}; the grids ask for {[patches, vision.patch_channels]}")
        return encode_patches(pixels.to(self.device), grids, weights, vision)

    def _rope_rows(self, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """cos and sin for every token of the batch, [tokens, 1, rotary]; the table grows as contexts do."""
        longest = max(span.end for span in spans)
        self._reach(longest)
        cos, sin = self._rope
        if len(spans) == 1:
            return cos[spans[0].start : longest], sin[spans[0].start : longest]
        return (
            torch.cat([cos[span.start : span.end] for span in spans]),
            torch.cat([sin[span.start : span.end] for span in spans]),
        )

    def _reach(self, position: int) -> None:
        if position > self._rope[0].shape[0]:
            self._rope = self._rope_table(max(position, 2 * self._rope[0].shape[0]))

    def _rope_table(self, positions: int) -> tuple[Tensor, Tensor]:
        t = self.config.text
        return paired_rope_table(torch.arange(positions, device=self.device), t.rotary_dim, t.rope_theta)
