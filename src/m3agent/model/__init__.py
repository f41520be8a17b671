"""MiniMax-M3 in torch: configuration, decoder, vision tower, and checkpoints in the released layout.

Weights come from and go to safetensors files; the KV cache is pages that the caller owns.
"""

from m3agent.model.batch import Span
from m3agent.model.checkpoint import load_model, read_tensors, resolve
from m3agent.model.config import M3Config, TextConfig, VisionConfig
from m3agent.model.m3 import M3Model
from m3agent.model.pages import KVPages
from m3agent.model.writer import save_checkpoint

__all__ = [
    "KVPages",
    "M3Config",
    "M3Model",
    "Span",
    "TextConfig",
    "VisionConfig",
    "load_model",
    "read_tensors",
    "resolve",
    "save_checkpoint",
]
