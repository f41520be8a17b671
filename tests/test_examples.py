"""The examples run as a user runs them, with the embedded model; the README shows the same ten lines."""

import importlib.util
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from m3agent.render.chromium import find_chromium
from tests.agent.double import ScriptedRuntime, block, call, make_tokenizer

ROOT = Path(__file__).parent.parent
EMBEDDED = (ROOT / "src/m3agent/nano/config.json").is_file()
needs_nano = pytest.mark.skipif(not EMBEDDED, reason="m3-nano is not in this checkout")


def run(name: str, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def load(name: str) -> ModuleType:
    """The example as a module, for what m3-nano was not trained to do: a scripted model takes its place."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@needs_nano
def test_ten_lines(tmp_path: Path):
    printed = run("ten_lines.py", tmp_path)
    assert "<circle" in printed
    assert "tokens/s" in printed


@needs_nano
def test_look_and_fix(tmp_path: Path):
    printed = run("look_and_fix.py", tmp_path)
    assert "draft 1: " in printed
    assert "ended: " in printed
    page = (tmp_path / "film_strip.html").read_text("utf-8")
    assert page.count("<article") >= 2


PAGE = """<!doctype html><style>body {{ margin: 0; font: 16px sans-serif }} #w {{ width: {width} }}</style>
<div id=w>Three cards</div>"""


@pytest.mark.anyio
@pytest.mark.skipif(find_chromium() is None, reason="Chromium is absent")
async def test_refine_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(call("render", code=PAGE.format(width="900px"))),
        block(call("render", code=PAGE.format(width="100%"))),
        "It fits a phone now.",
    )
    monkeypatch.chdir(tmp_path)
    result = await load("refine_page").work(runtime, "Three cards.", 4)
    first, second = result.steps
    assert [label for label, _ in first.pictures] == ["390x844", "1280x800"]
    assert first.notes[0].startswith("390x844: the page is 900 px wide and scrolls sideways")
    assert second.notes == ()
    assert result.stopped == "answered"
    assert "draft 2: 390x844, 1280x800\n" in capsys.readouterr().out
    page = (tmp_path / "refine_page.html").read_text("utf-8")
    assert page.count("<article") == 2
    assert page.count("<img ") == 4
    assert "900 px wide" in page
    assert "score" not in page.partition("<body>")[2].replace("Scores, pictures", "")  # nothing judged it


@needs_nano
@pytest.mark.skipif(find_chromium() is None, reason="Chromium is absent")
def test_refine_page_with_the_embedded_model(tmp_path: Path) -> None:
    assert "ended: " in run("refine_page.py", tmp_path, "--rounds", "1")
    assert (tmp_path / "refine_page.html").exists()


@needs_nano
def test_mcp_both_ways(tmp_path: Path):
    printed = run("mcp_both_ways.py", tmp_path)
    assert printed.startswith("tools: render\ncall: render <svg")
    assert "result:  Image(224x224, png" in printed


def test_the_readme_shows_the_ten_lines_as_they_are():
    program = (ROOT / "examples" / "ten_lines.py").read_text("utf-8").strip()
    assert f"```python\n{program}\n```" in (ROOT / "README.md").read_text("utf-8")
    assert len([line for line in program.splitlines() if line]) <= 10


@needs_nano
def test_structured_output(tmp_path: Path) -> None:
    printed = run("structured_output.py", tmp_path)
    assert "[end; " in printed
    assert re.search(r"^(circle|rectangle|triangle), .{0,12}, \d+ wide$", printed, re.MULTILINE)


@pytest.mark.anyio
async def test_shop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop = load("shop")
    shop.make_database(tmp_path / "shop.sqlite")
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(call("find", low_only="true")),
        block(call("order", sku="A-100", count="7"), call("order", sku="X-1", count="1")),
        "I ordered seven oak shelves.",
    )
    reply = await shop.ask(runtime, shop.Shop(tmp_path / "shop.sqlite"), "Order what is low.")
    printed = capsys.readouterr().out
    assert reply.text == "I ordered seven oak shelves."
    assert "→ order(sku='A-100', count=7)\n" in printed
    assert '"name": "oak shelf", "warehouse": "north", "stock": 3' in printed
    assert "warehouse north has no article 'X-1'" in printed
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as database:
        assert database.execute("SELECT * FROM orders").fetchall() == [("A-100", "north", 7)]


@needs_nano
def test_shop_with_the_embedded_model(tmp_path: Path) -> None:
    assert "prompt tokens" in run("shop.py", tmp_path, "Which articles are low?")
    assert (tmp_path / "shop.sqlite").exists()


@pytest.mark.anyio
@pytest.mark.parametrize("sandbox", [True, False])
async def test_coding_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str], sandbox: bool) -> None:
    if sandbox and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is absent")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sums.py").write_text("def total(numbers):\n    return sum(numbers) + 1\n")
    (folder / "check.py").write_text("import sums\nassert sums.total([1, 2]) == 3, 'wrong total'\nprint('passed')\n")
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(
        block(call("grep", pattern="def total"), call("shell", command="python3 check.py")),
        block(call("read", path="sums.py")),
        block(call("edit", path="sums.py", old="sum(numbers) + 1", new="sum(numbers)")),
        block(call("shell", command="python3 check.py")),
        "total added one too many.",
    )
    reply = await load("coding_agent").work(runtime, folder, "The check fails; mend it.", sandbox=sandbox)
    assert reply.stop == "end"
    assert (folder / "sums.py").read_text() == "def total(numbers):\n    return sum(numbers)\n"
    results = [result.text for message in reply.messages for result in message.results]
    assert "sums.py:1" in results[0]
    assert "wrong total" in results[1]
    assert results[-1] == "passed\n[exit code 0]"
    assert "→ edit" in capsys.readouterr().out


@pytest.mark.anyio
async def test_approvals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paused in one process, decided in another: only the file of messages is between them."""
    approvals = load("approvals")
    folder = tmp_path / "logs"
    folder.mkdir()
    for name, text in (("old.log", "x"), ("new.log", "y"), ("empty.log", "")):
        (folder / name).write_text(text)
    calls = block(*[call("remove", name=name) for name in ("old.log", "new.log", "empty.log")])
    runtime = ScriptedRuntime(make_tokenizer(tmp_path)).says(calls)
    reply = await approvals.go_on(runtime, folder, "Remove the logs.", {})
    assert reply.stop == "approval"
    assert "call_1 waits: remove(name='old.log')\ncall_2 waits" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["conversation.json", "new.log", "old.log"]

    another = ScriptedRuntime(make_tokenizer(tmp_path)).says("The old one is gone.")
    reply = await approvals.go_on(another, folder, None, {"call_1": True, "call_2": False})
    assert reply.text == "The old one is gone."
    assert [path.name for path in folder.iterdir()] == ["new.log"]
    assert "removed old.log" in another.tokenizer.decode(another.prompts[0])
    assert "not approved" in another.tokenizer.decode(another.prompts[0])
