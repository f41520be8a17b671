"""The examples run as a user runs them, with the embedded model; the README shows the same ten lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@needs_nano
def test_mcp_both_ways(tmp_path: Path):
    printed = run("mcp_both_ways.py", tmp_path)
    assert printed.startswith("tools: render\ncall: render <svg")
    assert "result:  Image(224x224, png" in printed


def test_the_readme_shows_the_ten_lines_as_they_are():
    program = (ROOT / "examples" / "ten_lines.py").read_text("utf-8").strip()
    assert f"```python\n{program}\n```" in (ROOT / "README.md").read_text("utf-8")
    assert len([line for line in program.splitlines() if line]) <= 10
