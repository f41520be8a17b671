"""A few steps of the real loop: it learns, drafts, is stopped, goes on, and exports what the runtime opens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from m3agent.model.checkpoint import read_tensors
from training import rollout
from training.export import export
from training.net import released_tensors
from training.plan import POLISH, Plan
from training.train import train

TINY = Plan(steps=4, rows=1, length=1024, pictures=5, warmup=1, ramp=1, drafts_from=0.0, drafts_every=2, drafts=2)


def test_the_learning_rate_rises_holds_and_falls_to_nothing() -> None:
    plan = Plan()
    rates = [plan.lr_at(step) for step in range(plan.steps)]
    assert rates[plan.warmup] == plan.lr == max(rates)
    assert rates[0] < plan.lr / 100
    assert rates[-1] < plan.lr / 1000
    assert all(POLISH.lr_at(step) > 0 for step in range(POLISH.steps))


def test_a_run_stops_goes_on_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "MAX_DRAFT", 8)
    torch.set_num_threads(1)
    train(replace(TINY, steps=2), tmp_path, 1e9, 0, None)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 2
    assert [json.loads(file.read_text()) for file in tmp_path.glob("drafts-*.json")] == [[]]
    net = train(TINY, tmp_path, 1e9, 0, None)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 4
    export(net, tmp_path / "checkpoint")
    stored, ours = read_tensors(tmp_path / "checkpoint"), released_tensors(net)
    assert stored.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.allclose(stored[name].float(), tensor, rtol=0.07, atol=1e-2 * tensor.abs().max().item()), name

    (tmp_path / "again").mkdir()
    untouched = train(replace(TINY, steps=0), tmp_path / "again", 1e9, 0, None, tmp_path / "checkpoint")
    assert torch.equal(
        released_tensors(untouched)["language_model.lm_head.weight"], stored["language_model.lm_head.weight"].float()
    )
