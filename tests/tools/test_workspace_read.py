"""Reading and searching a workspace."""

from __future__ import annotations

import fnmatch
import gc
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pil

import m3agent as m3
from m3agent.tools.execute import call_tool
from m3agent.tools.workspace import globs, search
from tests.tools.processes import descriptors


def call(root: Path, tool: str, **arguments: Any) -> Any:
    found = {tool.name: tool for tool in m3.tools.workspace(root, write=False)}[tool]
    args, kwargs = found.bind(arguments, m3.Context(tool, "call_1"))
    return found(*args, **kwargs)


@pytest.fixture(params=["ripgrep", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(search.shutil, "which", lambda name: None)
    elif shutil.which("rg") is None:
        pytest.skip("ripgrep is not installed")
    return request.param


def test_lines_have_numbers_and_ranges(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a\r\n\tb\x0cc\n\nd")
    assert call(tmp_path, "read", path="f") == "1\ta\n2\t\tb\x0cc\n3\t\n4\td"
    assert call(tmp_path, "read", path="f", start=2, end=3) == "2\t\tb\x0cc\n3\t\n… 1 more lines; read with start=4"
    assert call(tmp_path, "read", path="f", start=4, end=90) == "4\td"
    for start, end in ((5, None), (0, None), (3, 2)):
        with pytest.raises(m3.ToolError, match="'f' has lines 1 to 4"):
            call(tmp_path, "read", path="f", start=start, end=end)
    (tmp_path / "empty").touch()
    assert call(tmp_path, "read", path="empty") == "(the file is empty)"


def test_long_files_and_lines_are_cut_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x\n" * 1312)
    text = call(tmp_path, "read", path="f")
    assert text.endswith("500\tx\n… 812 more lines; read with start=501")
    assert call(tmp_path, "read", path="f", start=501).startswith("501\tx\n")
    (tmp_path / "wide").write_text("y" * 5000 + "\n" + "z" * 1900 + "\n" * 2)
    first, second, third = call(tmp_path, "read", path="wide").split("\n")
    assert first == f"1\t{'y' * 2000} … 3000 more characters"
    assert (second, third) == (f"2\t{'z' * 1900}", "3\t")
    (tmp_path / "many").write_text(("w" * 1900 + "\n") * 100)
    text = call(tmp_path, "read", path="many")
    assert len(text) < 31_000
    assert text.endswith("… 85 more lines; read with start=16")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfgr\xc3\xbcn", "1\tgrün"),
        (b"\xff\xfe" + "grün".encode("utf-16-le"), "1\tgrün\n(the file's encoding: UTF-16-LE)"),
        (b"\xfe\xff" + "grün".encode("utf-16-be"), "1\tgrün\n(the file's encoding: UTF-16-BE)"),
        (b"gr\xfcn \x80", "1\tgrün €\n(the file's encoding: Windows-1252)"),
        ("äöüß".encode() + b"\xff", "1\täöüß\ufffd\n(the file's encoding: UTF-8, with bytes that are not)"),
    ],
)
def test_encodings(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "f").write_bytes(data)
    assert call(tmp_path, "read", path="f") == text


def test_pictures_are_looked_at_and_other_binary_files_are_named(tmp_path: Path) -> None:
    Pil.new("RGB", (3, 2), "red").save(tmp_path / "no-suffix", "PNG")
    picture = call(tmp_path, "read", path="no-suffix")
    assert isinstance(picture, m3.Image)
    assert (picture.width, picture.height) == (3, 2)
    (tmp_path / "cut.png").write_bytes((tmp_path / "no-suffix").read_bytes()[:40])
    with pytest.raises(m3.ToolError, match=r"'cut.png'.*damaged or cut short"):
        call(tmp_path, "read", path="cut.png")
    (tmp_path / "BM").write_bytes(b"BM is no bitmap, but text\n")
    assert call(tmp_path, "read", path="BM") == "1\tBM is no bitmap, but text"
    (tmp_path / "zip").write_bytes(b"PK\x03\x04\x00\x00")
    with pytest.raises(m3.ToolError, match=r"'zip' is not text \(zip, 6 bytes\)"):
        call(tmp_path, "read", path="zip")
    with pytest.raises(m3.ToolError, match="it is a directory"):
        call(tmp_path, "read", path=".")


def test_list(tmp_path: Path) -> None:
    assert call(tmp_path, "list") == "(the directory is empty)"
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_text("four")
    os.mkfifo(tmp_path / "c")
    (tmp_path / "new\nline").touch()
    assert call(tmp_path, "list") == "a  4\nb/\nc  (other)\nnew\\nline  0"
    for number in range(300):
        (tmp_path / f"b/{number:03}").touch()
    assert call(tmp_path, "list", path="b").endswith("199  0\n… 100 more; use glob")
    with pytest.raises(m3.ToolError, match="not a directory"):
        call(tmp_path, "list", path="a")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in ("a.py", "b.txt", "src/c.py", "src/deep/d.py", "src/deep/e.md", ".git/f.py", "node_modules/g.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"first\nname is {path}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("*.py", ".", "a.py src/c.py src/deep/d.py"),
        ("./*.py", ".", "a.py"),
        ("src/*", ".", "src/c.py"),
        ("src/**", ".", "src/c.py src/deep/d.py src/deep/e.md"),
        ("**/deep/*.{md,txt}", ".", "src/deep/e.md"),
        ("**/[ab].*", ".", "a.py b.txt"),
        ("deep/*.py", "src", "src/deep/d.py"),
        ("*.py", ".git", ".git/f.py"),
        ("?.txt", ".", "b.txt"),
    ],
)
def test_glob(tree: Path, pattern: str, path: str, found: str) -> None:
    assert call(tree, "glob", pattern=pattern, path=path).split() == found.split()


def test_grep(tree: Path, engine: str) -> None:
    assert call(tree, "grep", pattern=r"NAME is \S+\.py$", ignore_case=True).splitlines() == [
        "a.py:2: name is a.py",
        "src/c.py:2: name is src/c.py",
        "src/deep/d.py:2: name is src/deep/d.py",
    ]
    assert call(tree, "grep", pattern="name", path="src", glob="*.md") == "src/deep/e.md:2: name is src/deep/e.md"
    assert call(tree, "grep", pattern="name", path="b.txt") == "b.txt:2: name is b.txt"
    assert call(tree, "grep", pattern="NAME") == "No match in 5 files."
    assert call(tree, "grep", pattern="-e", path="a.py") == "No match in 1 files."
    assert call(tree, "grep", pattern=r"(?<=is )b") == "b.txt:2: name is b.txt"  # ripgrep alone has no look-behind
    grep = {tool.name: tool for tool in m3.tools.workspace(tree)}["grep"]
    for pattern in ("(", "a\0", "\ud800"):
        with pytest.raises(m3.ToolError, match="The pattern "):
            grep(pattern, m3.Context("grep", "1"))


def test_grep_reads_encodings_and_skips_binary_files(tmp_path: Path, engine: str) -> None:
    (tmp_path / "crlf").write_bytes(b"x\r\ngr\xc3\xbcn\r\n")
    (tmp_path / "utf16").write_bytes(b"\xff\xfe" + "grün\n".encode("utf-16-le"))
    (tmp_path / "binary").write_bytes("grün\0".encode())
    assert call(tmp_path, "grep", pattern="^grün$") == "crlf:2: grün\nutf16:1: grün"


def test_grep_stops_at_its_limits_and_says_so(tmp_path: Path, engine: str) -> None:
    for number in range(150):  # more than are opened at once
        (tmp_path / f"{number:03}").write_text("hit\nhit\n")
    rows = call(tmp_path, "grep", pattern="hit").splitlines()
    assert rows[0] == "000:1: hit"
    assert len(rows) == 201
    assert rows[-1] == "… stopped after 200 matches; narrow the pattern, path or glob"
    assert len(call(tmp_path, "grep", pattern="hit", glob="1*").splitlines()) == 100
    (tmp_path / "wide").write_text("hit" + "x" * 5000)
    assert len(call(tmp_path, "grep", pattern="hit", path="wide")) < 400


def test_a_pattern_that_runs_for_ever_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.shutil, "which", lambda name: None)
    monkeypatch.setattr(search, "SECONDS", 1.0)
    (tmp_path / "f").write_text("a" * 60)
    with pytest.raises(m3.ToolError, match="Use a simpler pattern"):
        call(tmp_path, "grep", pattern="(a+)+$b")


def test_a_search_ends_when_its_run_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.shutil, "which", lambda name: None)
    (tmp_path / "f").write_text("a" * 60)
    context = m3.Context("grep", "1")
    threading.Timer(0.3, context.cancel).start()
    with pytest.raises(m3.ToolError, match="was cancelled"):
        {tool.name: tool for tool in m3.tools.workspace(tmp_path)}["grep"]("(a+)+$b", context)


def test_no_descriptor_is_left_open(tree: Path, engine: str) -> None:
    tools = {tool.name: tool for tool in m3.tools.workspace(tree)}
    (tree / "link").symlink_to("src/deep/../c.py")
    (tree / "out").symlink_to("/")
    calls: list[tuple[str, dict[str, Any]]] = [
        *[("read", {"path": path}) for path in ("link", "out/etc", "src", "nothing/x", "src/../a.py", "src/../..")],
        *[("grep", {"pattern": pattern}) for pattern in ("name", "(")],
        ("glob", {"pattern": "*.py"}),
        ("list", {}),
        ("edit", {"path": "link", "old": "first", "new": "1st"}),
        ("edit", {"path": "link", "old": "first", "new": "1st"}),
        ("write", {"path": "a/b/c", "content": ""}),
        ("diff", {}),
        ("undo", {"path": "link"}),
    ]
    before = descriptors()
    for tool, arguments in calls:
        with suppress(m3.ToolError):
            args, kwargs = tools[tool].bind(arguments, m3.Context(tool, "call_1"))
            tools[tool](*args, **kwargs)
    gc.collect()
    assert descriptors() == before
    del tools
    gc.collect()
    assert descriptors() == before - 1  # the root's own


@pytest.mark.anyio
async def test_tools_run_as_a_session_runs_them(tree: Path) -> None:
    tools = {tool.name: tool for tool in m3.tools.workspace(tree)}
    calls = {
        "read": {"path": "a.py", "start": 2},
        "multi_edit": {"path": "a.py", "edits": [{"old": "first", "new": "second"}]},
        "grep": {"pattern": "second"},
    }
    answers = [await call_tool(tools, name, given, m3.Context(name, "1")) for name, given in calls.items()]
    assert answers == [["2\tname is a.py"], ["Edited a.py at line 1."], ["a.py:1: second"]]


def test_descriptions_are_short(tmp_path: Path) -> None:
    for tool in m3.tools.workspace(tmp_path):
        assert 0 < len(tool.description) <= 110, tool.name


PATTERNS = st.lists(st.sampled_from(["a", "*", "?", "/", "**/", "b", "[ab]"]), min_size=1, max_size=6).map("".join)
PATHS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4).map("/".join)


def slowly(names: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return slowly(names, pattern[1:]) or (bool(names) and slowly(names[1:], pattern))
    return bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and slowly(names[1:], pattern[1:])


@given(PATTERNS.filter(lambda pattern: not pattern.startswith("/")), PATHS)
def test_patterns_mean_what_they_say(pattern: str, path: str) -> None:
    parts = [part for part in pattern.split("/") if part]
    parts = parts if "/" in pattern else ["**", *parts]
    assert globs.path_filter(pattern)(path) == slowly(path.split("/"), parts)
