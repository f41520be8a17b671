"""The package as a whole: what it exports, what importing it costs, and which way its imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import m3agent

ROOT = Path(m3agent.__file__).parent

# From the top down: a module may import from its own row and from rows below.
ROWS = [
    ["cli", "testing"],
    ["sessions"],
    ["loops"],
    ["agent"],
    ["subagent"],
    ["session"],
    ["session_file"],
    ["stream"],
    ["turn_loop"],
    ["run"],
    ["calls"],
    ["turn", "make_room"],
    ["rebuild"],
    ["history"],
    ["options"],
    ["answers"],
    ["compaction", "session_tools", "token_log"],
    ["transcript"],
    ["cutting"],
    ["approval", "limits"],
    ["hooks"],
    ["output"],
    ["events"],
    ["tracing"],
    ["tools"],
    ["render"],
    ["content"],
    ["backend"],
    ["runtime"],
    ["chat"],
    ["media"],
    ["model"],
    ["kernels"],
    ["background", "json_file", "mailbox"],
    ["errors"],
]
LEVEL = {name: len(ROWS) - row for row, names in enumerate(ROWS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of m3agent that a module imports, also inside functions and for type checking alone."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {parts[1] for parts in (name.split(".") for name in names) if parts[0] == "m3agent" and len(parts) > 1}
    return rooms & LEVEL.keys()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room not in LEVEL:
        pytest.fail(f"{room} has no place in the order of rooms; give it one in {Path(__file__).name}")
    upwards = {other for other in imported_rooms(path) if LEVEL[other] > LEVEL[room]}
    assert not upwards


def test_every_public_name_can_be_had() -> None:
    for name in m3agent.__all__:
        assert getattr(m3agent, name) is not None
    assert set(m3agent.__all__) <= set(dir(m3agent))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = m3agent.nothing


def test_every_folder_says_what_lives_there() -> None:
    for path in ROOT.rglob("__init__.py"):
        if path.parent.name != "nano":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT.parent)}
    ).stdout.strip()


def test_importing_takes_no_time_and_no_torch() -> None:
    code = (
        "import time, sys; start = time.perf_counter(); import m3agent; "
        "print(time.perf_counter() - start, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    runs = [run_python(code).split() for _ in range(5)]
    assert all(loaded == ["False", "False"] for _, *loaded in runs)
    assert min(float(seconds) for seconds, *_ in runs) < 0.2


def test_torch_comes_with_the_runtime_and_not_before() -> None:
    code = (
        "import sys, threading, logging, m3agent as m3\n"
        "m3.Agent, m3.Session, m3.Image, m3.Video, m3.Message, m3.TextDelta\n"
        "@m3.tool\n"
        "def f(a: int) -> m3.Image: ...\n"
        "print('torch' in sys.modules, threading.active_count(), logging.root.handlers)"
    )
    assert run_python(code) == "False 1 []"
