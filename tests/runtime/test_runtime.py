"""Opening and closing: errors before work, any task, any order, any loop."""

import gc
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from m3agent.errors import CheckpointError, ConfigError, RuntimeClosed
from m3agent.runtime import Runtime, Sampling
from m3agent.runtime import runtime as module
from m3agent.runtime.runtime import Opening
from tests.runtime.test_sequence import generated, prompt, sampled
from tests.runtime.tiny import END

pytestmark = pytest.mark.anyio
Open = Callable[..., Opening]


def engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "m3agent-engine"]


async def test_what_a_checkpoint_brings(checkpoint: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    runtime = await Runtime.open(checkpoint, progress=lambda *args: seen.append(args))
    async with runtime:
        assert runtime.defaults.sampling().temperature == 0.0
        assert runtime.defaults.thinking_mode == "disabled"
        assert END in runtime.stop_tokens
        assert len(runtime.stop_tokens) == 3
        assert runtime.context_length == 2048
        assert runtime.pixels is not None
        assert runtime.can.images
        assert runtime.tokenizer.decode(runtime.tokenizer.encode("héllo")) == "héllo"
        assert runtime.stats().total_pages == 8 * 2048 // 8
    assert seen[-1][0] <= seen[-1][1]
    assert len({name for _, _, name in seen}) > 20
    assert runtime.closed


async def test_defaults_without_a_file(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").unlink()
    async with Runtime.open(str(folder)) as runtime:
        assert (runtime.defaults.temperature, runtime.defaults.top_p, runtime.defaults.top_k) == (1.0, 0.95, 0)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("tokenizer.json", "tokenizer.json"), ("config.json", "config.json"), ("model", "safetensors")],
)
async def test_a_folder_without_a_part_of_a_model(checkpoint: Path, tmp_path: Path, missing: str, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    for path in folder.glob(f"{missing}*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=message):
        await Runtime.open(folder)
    assert not engines()


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "much"}, {"thinking_mode": "sometimes"}])
async def test_defaults_that_cannot_be_meant(checkpoint: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        await Runtime.open(folder)


async def test_no_such_folder_and_no_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        await Runtime.open(tmp_path / "nothing")
    monkeypatch.setattr(module, "EMBEDDED", tmp_path)
    with pytest.raises(CheckpointError, match="no m3-nano"):
        await Runtime.open()


async def test_cancelling_the_loading_stops_it(checkpoint: Path) -> None:
    seen: list[str] = []
    with anyio.CancelScope() as scope:

        def progress(done: int, total: int, name: str) -> None:
            seen.append(name)
            anyio.from_thread.run_sync(scope.cancel)

        async with Runtime.open(checkpoint, progress=progress):
            raise AssertionError("opened all the same")
    assert len(seen) == 1
    assert not engines()


async def test_opened_and_closed_in_different_tasks_in_any_order(opening: Open) -> None:
    runtimes: list[Runtime] = []

    async def enter() -> None:
        runtimes.append(await opening().__aenter__())

    for _ in range(3):
        async with anyio.create_task_group() as group:
            group.start_soon(enter)
    assert len(engines()) == 3
    async with anyio.create_task_group() as group:
        for runtime in (runtimes[0], runtimes[2], runtimes[1], runtimes[0]):
            group.start_soon(runtime.__aexit__, None, None, None)
    assert not engines()
    with pytest.raises(RuntimeClosed):
        runtimes[0].sequence()


async def test_a_closed_runtime_uses_no_pages_whatever_sessions_are_left(opening: Open) -> None:
    runtime = await opening()
    sequence = runtime.sequence()
    sequence.append(prompt(20))
    await generated(sequence, sampled(2))
    assert runtime.stats().used_pages == 3
    await runtime.close()
    assert runtime.stats().used_pages == 0
    sequence.close()
    assert runtime.stats().used_pages == 0


async def test_a_stop_token_outside_the_vocabulary(opening: Open) -> None:
    async with opening() as runtime:
        sequence = runtime.sequence()
        sequence.append([1])
        for token in (-1, runtime.vocabulary):
            with pytest.raises(ValueError, match="stop has"):
                sequence.generate(Sampling(stop=frozenset({token})))
        assert sequence.tokens == [1]


async def test_two_runtimes_at_once(opening: Open) -> None:
    async with opening() as one, opening() as two:
        first, second = one.sequence(), two.sequence()
        first.append(prompt(9))
        second.append(prompt(9))
        assert await generated(first, sampled(5)) == await generated(second, sampled(5))


async def test_a_forgotten_runtime_ends_its_thread(opening: Open) -> None:
    runtime = await opening()
    sequence = runtime.sequence()
    sequence.append([1])
    del runtime
    assert len(await generated(sequence, sampled(2))) == 2  # a sequence keeps its runtime
    del sequence
    gc.collect()
    limit = time.monotonic() + 20
    while engines() and time.monotonic() < limit:
        await anyio.sleep(0.005)
    assert not engines()


async def test_cache_tokens_are_rounded_up_to_pages(opening: Open) -> None:
    async with opening(cache_tokens=9) as runtime:
        assert runtime.stats().total_pages == 2
        assert runtime.context_length == 16  # no sequence can be longer than the whole cache
    with pytest.raises(ValueError, match="cache_tokens"):
        await opening(cache_tokens=0)
