"""`m3agent cache` on a store that another has open."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from m3agent.cli.app import app
from m3agent.runtime.kv.store import DiskStore
from tests.runtime.pages import check, key, put


def invoke(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], input=answer)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStore:
    monkeypatch.setenv("M3AGENT_CACHE", str(tmp_path))
    store = DiskStore(tmp_path, 1 << 20)
    for number in range(8):
        put(store, number, number - 1)
    store.pin("monday", [key(0)])
    return store


def test_listing_and_telling(store: DiskStore, tmp_path: Path) -> None:
    listed = invoke("ls").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [found.hex() for found in store.keys()]  # noqa: SIM118
    assert [line.split()[0] for line in listed if line.endswith("pinned")] == [key(0).hex()]
    rows = json.loads(invoke("ls", "--json").stdout)
    assert sum(row["size"] for row in rows) == store.stat().size
    assert "8 pages" in invoke("stat", "--folder", str(tmp_path)).stdout
    assert "pinned by monday" in invoke("stat").stdout
    told = json.loads(invoke("stat", "--json").stdout)
    assert (told["folder"], told["pages"], told["names"]) == (str(tmp_path), 8, ["monday"])


def test_verifying(store: DiskStore) -> None:
    assert invoke("verify").stdout == "Every page is whole.\n"
    store._path(key(3)).write_bytes(b"x")
    result = invoke("verify")
    assert result.exit_code == 1
    assert result.stdout == f"{key(3).hex()}: damaged or without its file; removed\n"
    assert json.loads(invoke("verify", "--json").stdout) == []
    check(store.get(key(4)), 4)


def test_making_room_and_clearing(store: DiskStore) -> None:
    limit = store.stat().size // 2
    result = invoke("gc", "--limit", str(limit))
    assert result.exit_code == 0, result.output
    left = store.stat()
    assert result.stdout.startswith(f"{8 - left.pages} pages evicted; {left.pages} pages, ")
    assert 0 < left.size <= limit
    check(store.get(key(0)), 0)
    assert invoke("clear", answer="n\n").exit_code == 1
    assert store.stat().pages == left.pages
    assert invoke("clear", answer="y\n").exit_code == 0
    assert store.stat().pages == 0
    assert put(store, 5)
    assert invoke("clear", "--yes").stdout == "1 page removed\n"
    assert store.get(key(5)) is None


@pytest.mark.parametrize("size", ["", "G", "-5", "5X", "1,000", "nan"])
def test_a_size_that_is_none_is_one_line(store: DiskStore, size: str) -> None:
    result = invoke("gc", "--limit", size)
    assert result.exit_code == 2
    assert result.stderr == f"m3agent: {size!r} is no size; write bytes, or a number with K, M, G or T\n"
    assert store.stat().pages == 8


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["gc", "--limit", "1G"], ["clear", "--yes"]])
def test_where_there_is_no_cache_none_is_made(tmp_path: Path, command: list[str]) -> None:
    folder = tmp_path / "none"
    result = invoke(*command, "--folder", str(folder))
    assert result.exit_code == 2
    assert result.stderr == f"m3agent: there is no cache in {folder}\n"
    assert not folder.exists()


def test_help_comes_without_torch() -> None:
    code = "import sys, m3agent.cli.app; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
