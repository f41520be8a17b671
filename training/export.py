"""The trained network as a checkpoint in the released MXFP8 layout, with all that `Runtime.open` reads beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from m3agent.model.config import M3Config
from m3agent.model.writer import save_checkpoint
from training.config import CONFIG, GENERATION, PREPROCESSOR
from training.net import Net, released_tensors
from training.tokenizer import NANO

SHARD = 15 << 20  # bytes


def export(net: Net, folder: Path) -> None:
    """Writes config.json, MXFP8 shards with their index, tokenizer, generation and preprocessor files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, M3Config.from_dict(CONFIG), released_tensors(net), quantize="mxfp8", max_shard_bytes=SHARD)
    for name, content in (("generation_config", GENERATION), ("preprocessor_config", PREPROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    if folder.resolve() != NANO.resolve():
        shutil.copy(NANO / "tokenizer.json", folder / "tokenizer.json")
