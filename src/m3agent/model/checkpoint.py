"""Checkpoints in the released layout: config.json, safetensors shards with an index, bf16 or MXFP8 weights.

Files are memory-mapped and read tensor by tensor; everything that can be wrong with them is found in the shards'
headers before the first weight is touched. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m3agent.errors import CheckpointError, MissingDependency
from m3agent.json_file import read_object
from m3agent.model.config import M3Config
from m3agent.model.m3 import M3Model
from m3agent.model.mxfp8 import BLOCK, NAN_SCALE, dequantize_mxfp8
from m3agent.model.released import Shape, released_tensors
from m3agent.model.writer import INDEX, SCALE

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name of the tensor just read


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, from its shard's header."""

    path: Path
    file: Any
    shape: Shape
    dtype: str


class CheckpointTensors(Mapping[str, Tensor]):
    """A folder's weights by released name, read when asked for; MXFP8 weights come out multiplied by their scales.

    Raises CheckpointError for missing or damaged files, for tensors that are missing, extra or misshapen, and, when
    read, for one with numbers that are not finite.
    """

    def __init__(self, folder: Path, config: M3Config, progress: Progress | None = None) -> None:
        self._stack = ExitStack()
        self._progress, self._done = progress, 0
        try:
            self._stored = {name: s for s in map_shards(folder, self._stack) for name, s in s.items()}
            check(self._stored, released_tensors(config))
            self._total = sum(math.prod(s.shape) * ITEM_BYTES[s.dtype] for s in self._stored.values())
        except BaseException:
            self._stack.close()
            raise

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        tensor = self._read(name, stored)
        if stored.dtype == "F8_E4M3":
            scales = self._read(name + SCALE, self._stored[name + SCALE])
            if int(scales.amax()) == NAN_SCALE:
                raise CheckpointError(f"{stored.path}: tensor {name + SCALE!r} has scales that are no numbers (255)")
            tensor = dequantize_mxfp8(tensor, scales)
        low, high = tensor.aminmax()  # many times faster than isfinite; a NaN anywhere is the answer to both
        if not (math.isfinite(low) and math.isfinite(high)):
            raise CheckpointError(
                f"{stored.path}: tensor {name!r} has numbers that are not finite; the file is damaged"
            )
        if self._progress is not None:
            self._progress(self._done, self._total, name)
        return tensor

    @property
    def stored_wide(self) -> bool:
        """Whether the weights are float32; routers and the patch embedding are so in every release, so one decides."""
        return self._stored["language_model.model.embed_tokens.weight"].dtype == "F32"

    def _read(self, name: str, stored: Stored) -> Tensor:
        try:
            tensor: Tensor = stored.file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{stored.path}: tensor {name!r} cannot be read ({error})") from error
        self._done += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._stored if not name.endswith(SCALE))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> M3Model:
    """A model from a checkpoint folder; `dtype` is that of the weights in memory, the router is float32 in any case.

    dtype None: bfloat16 on an accelerator; on the CPU float32 if the checkpoint is stored so, else float16, which holds
    bfloat16 and MXFP8 weights to within 2^-25 and computes in float32 (see M3Model). `progress(done, total, name)` is
    called after every tensor, with bytes. Raises ConfigError, CheckpointError.
    """
    folder = Path(folder)
    config = M3Config.load(folder)
    with CheckpointTensors(folder, config, progress) as tensors:
        if dtype is None and torch.device(device).type == "cpu":
            dtype = torch.float32 if tensors.stored_wide else torch.float16
        return M3Model(config, tensors, dtype=dtype or torch.bfloat16, device=device)


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All weights by released name, dequantised, in memory. Raises ConfigError, CheckpointError."""
    folder = Path(folder)
    with CheckpointTensors(folder, M3Config.load(folder)) as tensors:
        return {name: tensors[name].clone() for name in tensors}


def resolve(name: str | Path) -> Path:
    """The folder of a checkpoint: a path that exists, or a hub id `org/name` through huggingface_hub.

    Raises CheckpointError if there is no such folder, MissingDependency if the hub client is not installed.
    """
    if not str(name):
        raise CheckpointError("the name of the model is empty; give a checkpoint folder or a hub id such as org/name")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    parts = str(name).split("/")
    if path.exists() or isinstance(name, Path) or len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise CheckpointError(f"{name}: no such folder; give a checkpoint folder or a hub id such as org/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingDependency("huggingface_hub", "hub", f"Loading {name!r} by its hub id") from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except Exception as error:  # the client has no common base for its errors
        raise CheckpointError(f"{name}: neither a folder here nor a checkpoint that the hub gave ({error})") from error


def map_shards(folder: Path, stack: ExitStack) -> Iterator[dict[str, Stored]]:
    """Map every shard and give its tensors, `mtp.` ones left out. The maps close with the stack."""
    index = _read_index(folder)
    for file_name in sorted(set(index.values())) if index is not None else ["model.safetensors"]:
        path = folder / file_name
        if not path.is_file():
            raise CheckpointError(
                f"{path}: no such file" + (_no_weights(folder) if index is None else f"; {INDEX} names it")
            )
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            slices = {name: file.get_slice(name) for name in file.keys() if "mtp." not in name}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error}); was it cut short?") from error
        if index is not None:
            for name in (name for name, shard in index.items() if shard == file_name and "mtp." not in name):
                if name not in slices:
                    raise CheckpointError(f"{path}: tensor {name!r} is missing, though {INDEX} says it is here")
        yield {name: Stored(path, file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    whole = read_object(path)
    if whole is None:
        return None
    index = whole.get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) and v == Path(v).name for v in index.values()):
        raise CheckpointError(f"{path}: an index needs a weight_map that names files of this folder")
    return index


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
    return f"; {pickles[0]} is a pickle and is never read: save it as safetensors" if pickles else f", and no {INDEX}"


def check(stored: Mapping[str, Stored], expected: Mapping[str, Shape]) -> None:
    """Raises CheckpointError for the first tensor that is missing, misshapen, of an unknown type, or extra."""
    scales = {name + SCALE for name in expected if name in stored and stored[name].dtype == "F8_E4M3"}
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(f"tensor {name!r} is missing; the config asks for {list(shape)}")
        found = stored[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{found.path}: tensor {name!r} has shape {list(found.shape)}; the config asks for {list(shape)}"
            )
        if found.dtype not in ("BF16", "F16", "F32", "F8_E4M3"):
            raise CheckpointError(f"{found.path}: tensor {name!r} is {found.dtype}; BF16, F16, F32 or F8_E4M3 is read")
    for name in scales:
        _check_scales(name, stored, expected[name.removesuffix(SCALE)])
    for name, found in stored.items():
        if name not in expected and name not in scales:
            raise CheckpointError(f"{found.path}: tensor {name!r} ({list(found.shape)}) is not part of this model")


def _check_scales(name: str, stored: Mapping[str, Stored], weight: Shape) -> None:
    shape = (*weight[:-1], weight[-1] // BLOCK)
    if weight[-1] % BLOCK:
        raise CheckpointError(f"tensor {name.removesuffix(SCALE)!r} is F8_E4M3, but {list(weight)} has no whole blocks")
    if name not in stored:
        raise CheckpointError(f"tensor {name!r} is missing; its 8-bit weight needs scales of shape {list(shape)}")
    found = stored[name]
    if found.shape != shape or found.dtype != "U8":
        raise CheckpointError(
            f"{found.path}: tensor {name!r} is {found.dtype} {list(found.shape)}; its weight needs U8 {list(shape)}"
        )
