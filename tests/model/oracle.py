"""The same checkpoint in transformers' implementation; a test-only dependency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MiniMaxM3SparseForConditionalGeneration
from transformers.utils import logging

from m3agent.model import M3Config, save_checkpoint

logging.set_verbosity_error()
logging.disable_progress_bar()


def transformers_model(
    config: M3Config, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype = torch.float32
) -> Any:
    """Written by this package in the released layout, read by transformers."""
    save_checkpoint(folder, config, tensors, dtype=torch.float32)
    model = MiniMaxM3SparseForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    return model.eval()


@torch.no_grad()
def transformers_logits(model: Any, ids: Tensor, **media: Tensor) -> Tensor:
    """[n, vocab] float32 of one sequence."""
    return model(input_ids=ids[None], use_cache=False, **media).logits[0].float()
