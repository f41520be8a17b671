"""A checkpoint with random weights, small enough for tests, and the tools to compare it with an uncached run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from m3agent.model import KVPages, M3Config, M3Model, Span, TextConfig, VisionConfig, save_checkpoint
from m3agent.model.released import released_tensors
from m3agent.runtime import Runtime

SPELLINGS = """
]!p~[ <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <reponame> <filename> <gh_stars> <issue_start>
<issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <empty_output>
<commit_before> <commit_msg> <commit_after> ]~b] [e~[ ]!d~[ <function_call> <code_interpreter> ]<]speech[>[
]<]image[>[ ]<]video[>[ ]<]start·of·speech[>[ ]<]end·of·speech[>[ ]<]start·of·image[>[ ]<]end·of·image[>[
]<]start·of·video[>[ ]<]end·of·video[>[ ]<]vision·pad[>[ ]~!b[ <jupyter_error> <add_file> <delete_file> <rename_file>
<edit_file> <commit_message> <empty_source_file> <repo_struct> <code_context> <file_content> <source_files> <pr_start>
<review_comment> <filepath> <file_sep> <think> </think> <tool_call> </tool_call> ]<]frame[>[ ]<]start·of·frame[>[
]<]end·of·frame[>[ <|content_altered_placeholder|> ]<]minimax[>[ <mm:think> </mm:think>
"""
CONTROL = [spelling.replace("·", " ") for spelling in SPELLINGS.split()]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
IMAGE = 256 + 25
VIDEO = 256 + 26
END = 256 + 20

TEXT = TextConfig(
    vocab_size=320,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rotary_dim=4,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    intermediate_size=16,
    shared_intermediate_size=16,
    dense_intermediate_size=48,
    num_local_experts=4,
    num_experts_per_tok=2,
    routed_scaling_factor=2.0,
    max_position_embeddings=2048,
    index_heads=2,
    index_dim=8,
    block_size=8,
    topk_blocks=3,
    local_blocks=1,
    init_blocks=0,
    sparse_layers=(False, True, True),
    moe_layers=(False, True, True),
)
VISION = VisionConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    num_channels=3,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    layer_norm_eps=1e-5,
    rope_theta=10000.0,
    segment_max_frames=4,
)
CONFIG = M3Config(TEXT, VISION, IMAGE, VIDEO, 32)


def random_tensors(config: M3Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Released names to weights that keep activations near 1."""
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in released_tensors(config).items():
        fan_in = shape[-1] if len(shape) > 1 else 100
        tensors[name] = torch.randn(shape, generator=source) * (1.5 / fan_in**0.5)
    return tensors


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_checkpoint(folder: Path, config: M3Config = CONFIG) -> Path:
    save_checkpoint(folder, config, random_tensors(config), dtype=torch.float32)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "thinking_mode": "disabled"}))
    return folder


class Watched:
    """A model that calls `watch(spans)` before each step."""

    def __init__(self, model: M3Model, watch: Callable[[list[Span]], None]) -> None:
        self.model, self.watch = model, watch
        self.device = model.device

    def forward(self, spans: list[Span], pages: KVPages, logits: Sequence[int]) -> list[torch.Tensor]:
        self.watch(spans)
        return self.model.forward(spans, pages, logits)


def watch(runtime: Runtime, each_step: Callable[[list[Span]], None]) -> None:
    """Call `each_step` with the spans of every step of this runtime, in its worker, before it is computed."""
    steps = runtime.engine._steps
    steps.model = Watched(steps.model, each_step)


def uncached_logits(model: M3Model, tokens: list[int]) -> torch.Tensor:
    """The logits behind every token, [tokens, vocab], from one pass over fresh pages."""
    block = model.config.text.block_size
    count = -(-len(tokens) // block)
    pages = KVPages.allocate(model.config, count, model.dtype, model.device)
    return model.forward([Span(torch.tensor(tokens), 0, torch.arange(count))], pages, logits="all")[0]
