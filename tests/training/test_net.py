"""The training network is the runtime's model: same function, same names, after a trip through a checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

from m3agent.media.pixels import PixelSpec, image_patches
from m3agent.model.batch import Span
from m3agent.model.checkpoint import load_model
from m3agent.model.pages import KVPages
from training.config import CONFIG
from training.episodes import IMAGE_TOKENS
from training.export import export
from training.net import Net
from training.rollout import Cache, extend


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(3)
    net = Net(CONFIG)
    for layer in net.layers:
        layer.quantized = True  # as it is exported
        if layer.moe:
            layer.router_bias += torch.randn_like(layer.router_bias) * 0.1
    return net


@pytest.fixture(scope="module")
def exported(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano")
    export(net, folder)
    return folder


@pytest.mark.parametrize("select", [False, True])
def test_training_and_runtime_agree(net: Net, exported: Path, select: bool) -> None:
    """A picture and 1,150 tokens: more blocks than the index branch keeps, so `select` has something to choose."""
    length = 1150 if select else 300
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 255, (224, 224, 3), dtype=np.uint8)
    picture[40:120, 60:200] = (200, 30, 60)
    ids = torch.from_numpy(rng.integers(0, 1984, length))
    model = load_model(exported, dtype=torch.float32)
    patches = image_patches(picture, PixelSpec.from_folder(exported, model.config.vision))
    rows = model.encode_media(patches.pixels, patches.grids)
    assert rows.shape == (IMAGE_TOKENS, 384)
    pages = KVPages.allocate(model.config, 16, torch.float32, torch.device("cpu"))
    (ours,) = model.forward([Span(ids, 0, torch.arange(10), [(20, rows)])], pages, logits="all")

    padded = torch.zeros(1280 if select else 384, dtype=torch.long)
    padded[:length] = ids
    slots = torch.arange(20, 20 + IMAGE_TOKENS)
    with torch.no_grad():
        seen = net.see(torch.from_numpy(picture)[None])[0].float()
        hidden, _, _ = net(padded[None], torch.from_numpy(picture)[None], slots, torch.arange(8), select)
        theirs = net.logits(hidden)[0, :length]
    assert (seen - rows).norm() / rows.norm() < 0.02  # bf16 against float32
    error = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1)
    # A router or block choice may flip on a near tie in bf16; all but a few tokens agree closely.
    assert error.median() < 0.03
    assert (error < 0.1).float().mean() > 0.9
    assert (theirs.argmax(-1) == ours.argmax(-1)).float().mean() > 0.9


def test_rollout_extends_as_a_whole_row_would(net: Net) -> None:
    ids = torch.randint(0, 1984, (2, 256), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden, _, _ = net(
            ids, torch.zeros(1, 224, 224, 3, dtype=torch.uint8), torch.full((64,), 512), torch.arange(4), False
        )
        whole = net.logits(hidden)
        cache = Cache(net, 2, 300)
        embedded = torch.nn.functional.embedding(ids, net.embed).to(torch.bfloat16)
        extend(net, cache, embedded[:, :100], torch.tensor([100, 80]))  # the second row's last 20 are padding
        rest = torch.stack([embedded[0, 100:150], embedded[1, 80:130]])
        logits = extend(net, cache, rest, torch.tensor([50, 50]))
    for row, at in ((0, 149), (1, 129)):
        difference = (logits[row] - whole[row, at]).norm() / whole[row, at].norm()
        assert difference < 0.05
    assert cache.ends.tolist() == [150, 130]
