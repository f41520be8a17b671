"""The small files of a checkpoint: whatever is wrong with one is a CheckpointError that names it."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from m3agent.errors import CheckpointError
from m3agent.runtime import Runtime

pytestmark = pytest.mark.anyio

JSON = [
    "config.json",
    "tokenizer.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
]
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "no UTF-8": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "cut short": lambda path: path.write_text('{"a": '),
    "empty": lambda path: path.write_text(""),
    "a list": lambda path: path.write_text("[1]"),
    "null": lambda path: path.write_text("null"),
    "a text": lambda path: path.write_text('"a"'),
    "too deep": lambda path: path.write_text("[" * 100_000),
}


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """With a template of its own, for which tokenizer_config.json is read."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


async def refused(folder: Path, path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        await Runtime.open(folder)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", JSON)
async def test_a_file_that_is_no_json_object(folder: Path, name: str, damage: str) -> None:
    (folder / name).unlink(missing_ok=True)
    DAMAGE[damage](folder / name)
    await refused(folder, folder / name)


@pytest.mark.parametrize("damage", ["a folder", "a link to itself", "no UTF-8"])
async def test_a_template_that_is_no_text(folder: Path, damage: str) -> None:
    path = folder / "chat_template.jinja"
    path.unlink()
    DAMAGE[damage](path)
    await refused(folder, path)


@pytest.mark.parametrize("name", JSON)
async def test_a_file_without_permission(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text

    def read_text(path: Path, encoding: str) -> str:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, encoding)

    monkeypatch.setattr(Path, "read_text", read_text)
    await refused(folder, folder / name)


@pytest.mark.parametrize(
    "inside",
    [
        '{"model": []}',
        '{"model": {"type": "BPE", "vocab": [], "merges": []}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": 3}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}',
        '{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}, "added_tokens": null}',
        '{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": "a", "id": "1"}]}',
        '{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": 1, "id": 1}]}',
    ],
)
async def test_a_tokenizer_of_wrong_types(folder: Path, inside: str) -> None:
    (folder / "tokenizer.json").write_text(inside)
    await refused(folder, folder / "tokenizer.json")
