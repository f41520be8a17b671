"""`Runtime`: a loaded model with its KV cache, its worker thread, and what belongs to its checkpoint."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import torch

from m3agent.chat import ChatFormat, Tokenizer
from m3agent.errors import CheckpointError, RuntimeClosed
from m3agent.media.pixels import PixelSpec
from m3agent.model import KVPages, M3Config, M3Model, load_model, resolve
from m3agent.runtime.defaults import Defaults, stop_tokens
from m3agent.runtime.engine import Engine
from m3agent.runtime.guide import Guides
from m3agent.runtime.kv.store import DiskStore, cache_folder
from m3agent.runtime.kv.tiers import Tiers
from m3agent.runtime.meter import Rates
from m3agent.runtime.monitor import Monitor
from m3agent.runtime.otel import Metrics, weak_stats
from m3agent.runtime.sequence import Sequence
from m3agent.runtime.usage import SequenceStats, Stats

EMBEDDED = Path(__file__).parent.parent / "nano"
CACHE_BYTES = 1 << 30  # on the CPU, where untouched pages take no memory; on a GPU a share of what is free
CACHE_SHARE = 0.8
DISK_LIMIT = 20 << 30  # bytes

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Capabilities:
    """What this way of running a model can do; other backends may say False."""

    fork: bool = True  # sequences that share their past
    exact_reuse: bool = True  # no token is computed twice
    logits: bool = True
    images: bool = True
    video: bool = True


class Runtime:
    """Open one with `Runtime.open`; it serves any number of tasks, under asyncio and under trio, one after another."""

    def __init__(
        self,
        model: M3Model,
        tokenizer: Tokenizer,
        *,
        pixels: PixelSpec | None,
        defaults: Defaults,
        chat_format: ChatFormat | None = None,
        cache_tokens: int | None = None,
        host_cache: int | None = None,
        disk_cache: DiskStore | None = None,
        eight_bit_tiers: bool = False,
        max_active: int | None = None,
        max_waiting: int | None = None,
        name: str = "minimax-m3",
    ) -> None:
        self.name = name
        """What spans call the model: the checkpoint's folder or hub id, m3-nano for the embedded one."""
        self.config: M3Config = model.config
        self.fingerprint: str = model.fingerprint
        self.tokenizer = tokenizer
        self.chat_format = chat_format or ChatFormat(tokenizer)
        self.pixels = pixels
        self.defaults = defaults
        self.can = Capabilities(images=pixels is not None, video=pixels is not None)
        self.stop_tokens = stop_tokens(tokenizer)
        self.guides = Guides(tokenizer, self.config.text.vocab_size)
        self.placeholders = {"image": self.config.image_token_id, "video": self.config.video_token_id}
        self.merge = pixels.merge if pixels is not None else 1
        pages = _page_count(model, cache_tokens)
        context = self.config.text.max_position_embeddings
        self.context_length = min(context, pages * self.config.text.block_size)
        """The most tokens that one sequence can hold: the model's context, or the whole KV cache if that is smaller."""
        self.device = model.device
        self._monitor: Monitor | None = None
        self.engine = Engine(
            model,
            KVPages.allocate(self.config, pages, model.dtype, model.device),
            context=context,
            tiers=_tiers(model.device, host_cache, disk_cache),
            eight_bit=eight_bit_tiers,
            max_active=max_active,
            max_waiting=max_waiting,
        )
        self.engine.ended = Metrics(name, weak_stats(self.engine.stats)).ended
        weakref.finalize(self, self.engine.stop).atexit = False

    @staticmethod
    def open(
        model: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        cache_tokens: int | None = None,
        host_cache: int | None = None,
        disk_cache: str | Path | bool = False,
        disk_limit: int | None = DISK_LIMIT,
        eight_bit_tiers: bool = False,
        max_active: int | None = None,
        max_waiting: int | None = None,
        monitor: bool = False,
        progress: Progress | None = None,
    ) -> Opening:
        """`async with Runtime.open(…) as runtime:` or `runtime = await Runtime.open(…)`, then `await runtime.close()`.

        model: a checkpoint folder, a hub id "org/name", or None for the m3-nano inside the package. device: None
        takes a GPU where there is one. dtype: of the weights; None chooses as `m3agent.model.load_model` does.
        cache_tokens: the size of the KV cache, shared by all sequences; None takes what the device has room for.
        host_cache: bytes of the host's memory for pages that leave the device; None is a quarter of it for a GPU, and
        none on a CPU, where pages are in it anyway. disk_cache: a folder for pages that outlive the process, True for
        the user's cache folder (see `m3agent cache`); any number of runtimes may share it. disk_limit: its bytes, None
        for no limit. eight_bit_tiers: keep keys and values in 8 bits in the host's memory and on the disk, which takes
        half the space (a third, on a CPU); what comes back from there is no longer exact, see docs/cache.md.
        max_active: calls that generate at a time, None for any number; more wait for their turn. max_waiting: how many
        may; beyond, a call raises Overloaded at once. None for any number. monitor: let `m3agent top` see it.
        progress(done, total, tensor name), in bytes, is called in the loading thread.
        Awaiting raises CheckpointError, ConfigError, CacheError, MissingDependency. Being cancelled stops the loading.
        """
        cache = CacheSizes(cache_tokens, host_cache, disk_cache, disk_limit, eight_bit_tiers)
        crowd = Crowd(max_active, max_waiting)

        def load(watch: Progress) -> Runtime:
            runtime = _load(model, device, dtype, cache, crowd, watch)
            if monitor:
                runtime.monitor()
            return runtime

        return Opening(load, progress)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has."""
        return self.config.text.vocab_size

    @property
    def closed(self) -> bool:
        return self.engine.stopped or self.engine.closing

    def sequence(self) -> Sequence:
        """An empty token log. Raises RuntimeClosed."""
        if self.closed:
            raise RuntimeClosed("the runtime is closed")
        return Sequence(self)

    def stats(self) -> Stats:
        """Pages, requests and sums at this moment."""
        return self.engine.stats()

    def rates(self) -> Rates:
        """Tokens, steps and operations a second, over the last ten seconds."""
        return self.engine.rates()

    def sequences(self) -> list[SequenceStats]:
        """Who holds which part of the cache: the open sequences, the ones used last first."""
        return self.engine.sequences()

    def report(self) -> dict[str, Any]:
        """All that there is to see, as plain data; what `m3agent top` shows."""
        return {
            "model": self.name,
            "pid": os.getpid(),
            "device": str(self.device),
            "stats": asdict(self.stats()),
            "rates": asdict(self.rates()),
            "sequences": [asdict(each) for each in self.sequences()],
        }

    def monitor(self) -> None:
        """Let other processes of this user see `report`, until the runtime is closed. Raises CacheError where there can
        be no socket.
        """
        if self._monitor is None:
            seen = weakref.WeakMethod(self.report)

            def report() -> dict[str, Any]:
                found = seen()
                return {} if found is None else found()

            self._monitor = Monitor(report)
            weakref.finalize(self, self._monitor.close)

    async def close(self, drain: float | None = 0) -> None:
        """End the running calls with RuntimeClosed and free the memory. From any task, as often as you like.

        drain: seconds for which running calls may go on until they end by themselves, None for as long as they take;
        new ones are refused meanwhile.
        """
        if drain is None or drain > 0:
            await anyio.to_thread.run_sync(self.engine.drain, drain, abandon_on_cancel=True)
        if self._monitor is not None:
            self._monitor.close()
        self.engine.stop()
        await anyio.to_thread.run_sync(self.engine.stop_and_wait)

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # as long as one step
            await self.close()


@dataclass(frozen=True)
class CacheSizes:
    """What `Runtime.open` was told about its cache."""

    device_tokens: int | None
    host: int | None
    disk: str | Path | bool
    disk_limit: int | None
    eight_bit: bool

    def open_disk(self) -> DiskStore | None:
        if self.disk is False:
            return None
        return DiskStore(cache_folder() if self.disk is True else self.disk, self.disk_limit)


@dataclass(frozen=True)
class Crowd:
    """How many calls `Runtime.open` was told to bear."""

    active: int | None
    waiting: int | None

    def __post_init__(self) -> None:
        if self.active is not None and self.active < 1:
            raise ValueError(f"max_active must be at least 1, not {self.active}")
        if self.waiting is not None and (self.waiting < 0 or self.active is None):
            raise ValueError("max_waiting must be 0 or more, and needs max_active beside it")


class Opening:
    """A runtime that is to be opened: await it, or enter it."""

    def __init__(self, load: Callable[[Progress], Runtime], progress: Progress | None) -> None:
        self._load = load
        self._progress = progress
        self._runtime: Runtime | None = None

    def __await__(self) -> Generator[Any, None, Runtime]:
        return self._open().__await__()

    async def _open(self) -> Runtime:
        return await anyio.to_thread.run_sync(self._load, self._watch)

    def _watch(self, done: int, total: int, name: str) -> None:
        anyio.from_thread.check_cancelled()
        if self._progress is not None:
            self._progress(done, total, name)

    async def __aenter__(self) -> Runtime:
        self._runtime = await self._open()
        return self._runtime

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runtime is not None
        await self._runtime.__aexit__(kind, error, trace)


def _load(
    name: str | Path | None,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    cache: CacheSizes,
    crowd: Crowd,
    progress: Progress,
) -> Runtime:
    """Small files first: what is wrong with them is said before the weights are read."""
    files = small_files(name)
    disk = cache.open_disk()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loaded = load_model(files.folder, device=where, dtype=dtype, progress=progress)
    return Runtime(
        loaded,
        files.tokenizer,
        pixels=files.pixels,
        defaults=files.defaults,
        chat_format=files.chat_format,
        cache_tokens=cache.device_tokens,
        host_cache=cache.host,
        disk_cache=disk,
        eight_bit_tiers=cache.eight_bit,
        max_active=crowd.active,
        max_waiting=crowd.waiting,
        name="m3-nano" if name is None else str(name),
    )


@dataclass(frozen=True)
class SmallFiles:
    """All of a checkpoint but its weights."""

    folder: Path
    config: M3Config
    tokenizer: Tokenizer
    defaults: Defaults
    chat_format: ChatFormat
    pixels: PixelSpec | None


def small_files(name: str | Path | None) -> SmallFiles:
    """Of a folder or hub id; None is the embedded m3-nano. Raises CheckpointError, ConfigError, MissingDependency."""
    if name is None and not (EMBEDDED / "config.json").is_file():
        raise CheckpointError("this copy of m3agent holds no m3-nano; name a checkpoint: Runtime.open('folder')")
    folder = EMBEDDED if name is None else resolve(name)
    config = M3Config.load(folder)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.size > config.text.vocab_size:
        problem = f"{folder}: tokenizer.json has {tokenizer.size} ids, the model's vocabulary {config.text.vocab_size}"
        raise CheckpointError(problem)
    defaults = Defaults.from_folder(folder)
    chat_format = ChatFormat.load(folder, tokenizer)
    pixels = PixelSpec.from_folder(folder, config.vision) if config.vision is not None else None
    return SmallFiles(folder, config, tokenizer, defaults, chat_format, pixels)


def _page_count(model: M3Model, cache_tokens: int | None) -> int:
    block = model.config.text.block_size
    if cache_tokens is not None:
        if cache_tokens < 1:
            raise ValueError(f"cache_tokens must be at least 1, not {cache_tokens}")
        return -(-cache_tokens // block)
    budget = CACHE_BYTES
    if model.device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(model.device)[0] * CACHE_SHARE)
    fits = budget // KVPages.bytes_per_page(model.config, model.dtype)
    return max(1, min(fits, 8 * -(-model.config.text.max_position_embeddings // block)))


def _tiers(device: torch.device, host: int | None, disk: DiskStore | None) -> Tiers | None:
    if host is None:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 if device.type == "cuda" else 0
    return Tiers(host, disk) if host or disk is not None else None
